"""The papers' figures: some drawn from the tables' results, some with an experiment of their own."""
