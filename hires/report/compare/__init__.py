"""Is one set of runs better or worse than another?"""
