"""Language models as a task of the trainer: corpus, windows, objective, the request for a run, and the model card.

Begin with `prepared.py`, whose `train_language_model` makes a whole run. Imports the trainer beside it and `models`.
"""
