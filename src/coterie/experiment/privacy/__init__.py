"""How much privacy a run gives: what may be protected, what is released, and what that costs in epsilon."""
