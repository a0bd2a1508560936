"""Whether heads, projections and batch items are kept apart and joined as promised."""
