"""Runs commands and ends their processes: the layer below the tests, which the graders use as
well.
"""
