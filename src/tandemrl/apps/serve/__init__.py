"""``tandemrl serve``: an OpenAI-compatible server whose responses name the author of each token, over any engine with
open calls.

``engine_server`` starts the application ``engine_app``. ``requests`` reads who writes, ``asked`` the rest of a request;
an ``engine_thread`` writes; ``texts`` and ``responses`` make the answers. ``conversations`` go on from request to
request. ``address`` is where the server listens.
"""
