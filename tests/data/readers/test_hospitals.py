import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import coterie
from coterie.data.readers.hospitals import CHILDREN, REVERSED, SHARING, TEST, VALIDATION, hospitals

STRANGERS = {*REVERSED, *CHILDREN}


def parts(federation, client, *names):
    index = np.concatenate([federation.clients[client][name] for name in names])
    return federation.x[index].numpy(), federation.y[index].numpy()


def test_sizes_and_seeds():
    one, same, other = (hospitals("hospitals", seed, 0.1, 0.3) for seed in (0, 0, 1))
    for client, train in {**SHARING, **REVERSED, **CHILDREN}.items():
        split = one.clients[client]
        assert (len(split.train), len(split.validation), len(split.test)) == (train, VALIDATION, TEST)
    assert np.array_equal(one.x, same.x)
    assert not np.array_equal(one.x, other.x)
    assert not set.intersection(*(set(split.train) | set(split.test) for split in one.clients.values()))


def test_the_truth_is_what_the_docstring_says():
    """A model of the five other sharing hospitals is good at the sixth, and of no use for the two strangers."""
    federation = hospitals("hospitals", 2, 0.1, 0.3)
    for client in (*SHARING, *STRANGERS):
        others = [parts(federation, each, "train", "test") for each in SHARING if each != client]
        x, y = (np.concatenate(each) for each in zip(*others, strict=True))
        model = LogisticRegression(max_iter=1000).fit(x, y)
        x, y = parts(federation, client, "test")
        shared = roc_auc_score(y, model.decision_function(x))
        own = roc_auc_score(y, LogisticRegression(max_iter=1000).fit(x[:500], y[:500]).decision_function(x))
        assert own > 0.8
        assert (shared > 0.8) == (client in SHARING), (client, shared)


def test_most_who_gain_share_their_illness():
    """What `coterie demo` shows of a recommended method is in tests/cli/test_demo.py."""
    result = coterie.run("fedmap", "hospitals", take_home_folds=0, engine="loop", compile=True, workers=1)
    assert len({*result.benefit().who("gains")} & SHARING.keys()) >= 3
    assert not result.take_home.benefit.who("loses")
