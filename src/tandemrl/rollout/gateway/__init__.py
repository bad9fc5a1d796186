"""An OpenAI-compatible server whose responses name the author of each token, over any engine with open calls.

``engine_app`` is the application. ``requests`` reads what is asked, in one of three forms (messages, texts, token ids);
an ``engine_thread`` writes; ``texts`` makes the answers. ``conversations`` go on from request to request, and so do
``sessions``, endpoints that record what one program asks (``/sessions/NAME/v1``), for training. ``address`` is where
the server listens; ``asgi`` and ``fields`` refuse what no server of ours takes.
"""
