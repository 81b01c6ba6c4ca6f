"""From a configuration to rounds to a run folder."""
