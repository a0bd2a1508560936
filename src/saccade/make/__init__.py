"""Make: models with published weights, one trainer, tasks on a user's data, and heads removed for good.

Each imports those before it: `models`, `training`, `pruning`, `tasks`.
"""
