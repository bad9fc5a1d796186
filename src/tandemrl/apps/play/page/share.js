"use strict";
// The finished text as a page of its own: no script, no links, every text escaped.

function escaped(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => entities[character]);
}

function sharedPage(draft, shown, names, style) {
  const words = shown.map(
    (token) =>
      `<span class="${token.kind}" title="${token.kind}; the junior's surprise: ` +
      `${token.surprisal.toFixed(2)} nats">${escaped(token.text)}</span>`,
  );
  const rows = [
    ["senior", names.senior],
    ["junior", names.junior],
    ["who writes", JSON.stringify(draft.selection)],
    ["temperature", draft.temperature],
    ["seed", draft.seed],
  ].map(([name, value]) => `<tr><th scope="row">${name}</th><td>${escaped(String(value))}</td></tr>`);
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Written together</title>
<style>${style}</style>
</head>
<body>
<h1>Written together</h1>
<p><span class="senior">senior</span> <span class="junior">junior</span> <span class="person">person</span></p>
<p>Prompt: ${escaped(draft.prompt)}</p>
<section id="text">${words.join("")}</section>
<table>${rows.join("")}</table>
</body>
</html>
`;
}
