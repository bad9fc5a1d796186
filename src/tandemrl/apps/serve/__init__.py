"""``tandemrl serve``: the OpenAI-compatible server of ``rollout.gateway`` over a pair, which ``engine_server`` loads,
for ``play``, too; and ``corpus``, a server of an index of documents.
"""
