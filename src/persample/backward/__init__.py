"""From losses to forms: check that the losses are one per sample, run autograd, collect.

``passes.py`` runs the pass. ``collector.py`` takes what each tap receives, and ``rule_choice.py``
asks the rule of the operator for a form.
"""
