"""An OpenAI-compatible server whose responses name the author of each token, over any engine with open calls.

``engine_app`` is the application. ``requests`` reads what is asked, in one of three forms (messages, texts, token ids);
an ``engine_thread`` writes; ``texts`` makes the answers. ``sessions`` are endpoints (``/sessions/NAME/v1``) that go on
from request to request, and record for training what one program asks. ``address`` is where the server listens;
``asgi`` and ``fields`` refuse what no server of ours takes.
"""
