"""What a problem is and what a right answer is: a folder for each family, with its rows and its grader or judge.

The rest knows them by ``module:name`` (``config.catalogue``, ``rewards.routing.SCORERS``).
"""
