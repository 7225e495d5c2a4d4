"""Prompts that generators write, each with what a reward reads of it: GenEval's six tasks and text
to be drawn; checklists for them.

A source is a module with train_prompts() and eval_prompts(), lists of {"prompt": text, **meta},
disjoint by what they ask for, the same on every machine.
"""
