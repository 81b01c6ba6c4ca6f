"""The metrics of each kind of target, one file a kind. Each file has the same functions.

- `names(target)`: the metrics, the loss of the task last;
- `default(target)`: the one that selects rounds;
- `scorer(target, y, owner, clients)`: a function from all clients' outputs to {metric: [clients]};
- `statistic(target, metric, one)`: a metric of one client as a function of how often each example counts;
- `depends_on(target, metric, one)`: what the metric depends on, to tell on which examples two models differ.
"""
