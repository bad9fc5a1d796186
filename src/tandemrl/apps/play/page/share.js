"use strict";
// The finished text as a page of its own: no script, no links, every text escaped.

function escaped(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => entities[character]);
}

const SPECIAL = "▪"; // stands for a special token, whose name is its title

function named({ text, special }) {
  return special ? `${text ? `${JSON.stringify(text)} and ` : ""}the special token ${special}` : JSON.stringify(text);
}

function nats({ surprisal }) {
  return `${surprisal.toFixed(2)} nats`;
}

function sharedPage(draft, shown, names, style) {
  const words = shown.map(
    (span) =>
      `<span class="${span.kind}" title="${escaped(named(span))}, by the ${span.kind}: ` +
      `${nats(span)}">${escaped(span.text + (span.special ? SPECIAL : ""))}</span>`,
  );
  const rows = [
    ["senior", names.senior],
    ["junior", names.junior],
    ["strategy", JSON.stringify(draft.selection)],
    ["temperature", draft.temperature],
    ["seed", draft.seed],
  ].map(([name, value]) => `<tr><th scope="row">${name}</th><td>${escaped(String(value))}</td></tr>`);
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Generated together</title>
<style>${style}</style>
</head>
<body>
<h1>Generated together</h1>
<p><span class="senior">senior</span> <span class="junior">junior</span> <span class="person">person</span></p>
<p>Prompt: ${escaped(draft.prompt)}</p>
<section id="text">${words.join("")}</section>
<table>${rows.join("")}</table>
</body>
</html>
`;
}
