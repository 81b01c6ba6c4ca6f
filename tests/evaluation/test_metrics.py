import numpy as np
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, mean_squared_error, r2_score
from torch import nn

from coterie.evaluation import score
from coterie.task import Task


def test_classification_equals_scikit_learn_for_every_client():
    draw = np.random.default_rng(0)
    owner = np.repeat([0, 1, 2], [40, 7, 90])
    y = draw.integers(4, size=len(owner))
    y[owner == 1] %= 2  # this client lacks two classes
    logits = draw.standard_normal((len(owner), 4))
    task = Task(nn.Linear(2, 4), num_classes=4)
    scores = score(task, torch.from_numpy(logits), torch.from_numpy(y), torch.from_numpy(owner), 3)
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for i in range(3):
        own, found = y[owner == i], logits[owner == i].argmax(1)
        np.testing.assert_allclose(scores["accuracy"][i], accuracy_score(own, found))
        np.testing.assert_allclose(scores["loss"][i], log_loss(own, probability[owner == i], labels=range(4)))
        # scikit-learn ignores predictions of classes that do not occur, and so do we
        recall = [np.mean(found[own == label] == label) for label in np.unique(own)]
        np.testing.assert_allclose(scores["balanced_accuracy"][i], np.mean(recall))
    np.testing.assert_allclose(
        scores["balanced_accuracy"][0], balanced_accuracy_score(y[owner == 0], logits[owner == 0].argmax(1))
    )


def test_regression_equals_scikit_learn_for_every_client():
    draw = np.random.default_rng(0)
    owner = np.repeat([0, 1], [30, 12])
    y = draw.standard_normal(42)
    outputs = y[:, None] + 0.3 * draw.standard_normal((42, 1))
    task = Task(nn.Linear(2, 1), "regression")
    scores = score(task, torch.from_numpy(outputs), torch.from_numpy(y), torch.from_numpy(owner), 2)
    for i in range(2):
        own, found = y[owner == i], outputs[owner == i, 0]
        np.testing.assert_allclose(scores["rmse"][i], mean_squared_error(own, found) ** 0.5)
        np.testing.assert_allclose(scores["r2"][i], r2_score(own, found))
        np.testing.assert_allclose(scores["loss"][i], mean_squared_error(own, found))
