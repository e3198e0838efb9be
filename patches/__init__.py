"""Families of models: a table, the generic path that all of them use, and the code that a family needs."""
