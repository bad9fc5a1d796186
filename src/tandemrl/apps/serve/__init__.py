"""``tandemrl serve``: OpenAI-compatible servers whose responses name the author of each token.

``authorship`` is the middleware around a server: ``requests`` (who writes), ``conversations`` (chats from request to
request), ``registry`` (strategies by name), ``responses`` (the authors). Behind it stands vLLM's own server
(``vllm_server`` with ``vllm_guard``), or ``engine_server``: the application ``engine_app`` over any engine, which
writes in an ``engine_thread``; ``asked`` reads requests, ``texts`` makes the answers. ``address`` and ``tool_calls``
are of both.
"""
