import pytest
import torch
from torch import nn

from coterie.models.lstm import LSTM, lstm


@pytest.mark.parametrize(("dim", "hidden", "layers", "length"), [(5, 4, 1, 1), (3, 6, 2, 7), (50, 50, 2, 25)])
def test_it_is_nn_lstm_with_the_same_weights(dim, hidden, layers, length):
    torch.manual_seed(0)
    theirs = nn.LSTM(dim, hidden, layers, batch_first=True, bidirectional=True)
    ours = LSTM(dim, hidden, layers)
    assert {name: p.shape for name, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, length, dim)
    expected, (states, _) = theirs(x)
    out, forward, backward = ours(x)
    for one, other in ((out, expected), (forward, states[-2]), (backward, states[-1])):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    out.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_the_classifier_reads_last_output_and_final_states():
    torch.manual_seed(0)
    model = lstm((4, 3), 2, hidden=5, wide=6)
    caught = []
    model.wide.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    x = torch.randn(2, 4, 3)
    model(x)
    out, forward, backward = model.recurrent(x)
    torch.testing.assert_close(caught[0], torch.cat([out[:, -1], backward, forward], 1))
    torch.testing.assert_close(out[:, -1, :5], forward)


def test_words_by_number_have_embeddings_of_their_own():
    model = lstm((6,), 2, vocabulary=9, dim=4, hidden=3, wide=5)
    words = torch.randint(9, (2, 6), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(words), model(words.float()))
    with pytest.raises(ValueError, match="needs a sequence of"):
        lstm((1, 8, 8), 2)
