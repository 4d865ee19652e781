"""Membership inference: scores that are higher for records that a model was trained on, and how good they are.

Nothing here trains a target: attacks read what models say of records. An attack that finds little is no evidence of privacy;
it can only show what a model leaks at least.
"""
