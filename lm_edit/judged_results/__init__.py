"""Judged columns for finished runs: results as the runs would have written them with a judge.

A run on a machine without a network saves its answers (``--log_samples``). Here the tasks are built again with a judge
and the documents of the samples, and the saved answers go through their filters, scores and aggregations.
"""
