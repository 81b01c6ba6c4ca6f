"""Search: which settings suit a federation (`tune`), and which method (`recommend`). Only validation data decide."""
