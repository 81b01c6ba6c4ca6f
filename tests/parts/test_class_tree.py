import pytest
import torch

from coterie.parts.class_tree import ABSENT, balanced_tree, depth, nodes, parted, sides


def test_depth():
    assert [depth(classes) for classes in (1, 2, 3, 4, 5, 10, 100)] == [1, 1, 2, 2, 3, 4, 7]


def test_near_classes_part_last():
    mean = torch.tensor([[0.0, 0.0], [9.0, 9.0], [0.3, 0.0], [9.0, 8.5]])
    tree = balanced_tree(mean, torch.ones(4, dtype=torch.bool))
    assert (tree >> 1).tolist() == [0, 1, 0, 1]
    assert sorted(tree.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("present", [0b1, 0b100, 0b101, 0b1110011, 0b1111111])
def test_every_class_that_there_is_has_a_leaf_of_its_own(present):
    here = torch.tensor([bool(present >> k & 1) for k in range(7)])
    mean = torch.randn(7, 3, generator=torch.Generator().manual_seed(present))
    tree = balanced_tree(torch.where(here[:, None], mean, torch.nan), here)  # what others have does not matter
    assert (tree[~here] == ABSENT).all()
    assert len(set(tree[here].tolist())) == int(here.sum())
    # Choices are enough to tell classes apart: two of them take different sides where they are in the same node.
    choice, node, side = parted(tree, tree, 3), nodes(tree, 3), sides(tree, 3)
    for one in here.nonzero().flatten().tolist():
        for other in here.nonzero().flatten().tolist():
            apart = choice[:, one] & (node[:, one] == node[:, other]) & (side[:, one] != side[:, other])
            assert int(apart.sum()) == (one != other)
    assert not choice[:, ~here].any()
    assert not choice.any() or int(here.sum()) > 1


def test_nodes_are_split_in_halves():
    mean = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    tree = balanced_tree(mean, torch.ones(10, dtype=torch.bool))
    for d, sizes in ((1, {5}), (2, {2, 3}), (3, {1, 2})):
        assert set((tree >> (4 - d)).unique(return_counts=True)[1].tolist()) == sizes


def test_equal_means_still_get_different_leaves():
    tree = balanced_tree(torch.zeros(5, 2), torch.ones(5, dtype=torch.bool))
    assert len(set(tree.tolist())) == 5


def test_stacked_clients_get_what_each_would_get():
    mean = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(2))
    here = torch.rand(3, 6, generator=torch.Generator().manual_seed(3)) > 0.3
    found = torch.func.vmap(balanced_tree)(mean, here)
    assert torch.equal(found, torch.stack([balanced_tree(*each) for each in zip(mean, here, strict=True)]))
