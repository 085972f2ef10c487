"""Policies over tasks. To read in this order: compare, cells, work, folder, result, verdict, tables, charts, page."""
