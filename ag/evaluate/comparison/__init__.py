"""Comparisons: a table with a row for each policy, budget and task, and its report.

``cells`` lists what to run, ``work`` runs it (each prompt is read once for all policies), ``folder`` keeps the rows.
``rows`` makes them a table, paired with the baseline by ``statistics``; ``verdict``, ``tables`` and ``figures`` say,
write and draw what is in it, and ``page`` puts these together. ``join`` reads several folders as one, and ``compare``
has the commands.
"""
