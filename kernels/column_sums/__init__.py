"""What each key was paid: sums of attention weights over queries."""

from ag.kernels.column_sums.chunked import column_sums as column_sums
