"""Stages of ``scripts/gpu_check.py``, each a program of its own: a crash on the card must not take the report along."""
