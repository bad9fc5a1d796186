"""What is built on the core: reports, plans, the page of ``tandemrl play``, servers, experiments, scores of files.

The core never imports an app (``tests/test_imports.py``); an app may be deleted without touching it.
"""
