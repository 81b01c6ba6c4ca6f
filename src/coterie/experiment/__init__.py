"""Turn a configuration into rounds of training, and these into results and a run folder."""
