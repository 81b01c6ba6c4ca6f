"""What docs/methods.md says about each method that no program can find out: what is kept, and when to use it."""

from __future__ import annotations

from typing import NamedTuple


class Note(NamedTuple):
    """Words about a method."""

    keeps: str  # what stays at the client from round to round
    use: str  # completes "Use it when ..."
    sent: str = ""  # who is sent what, where two rounds do not show it


NOTES = {
    "local": Note(
        "its model",
        "clients have much data, or nothing in common. It is what every other method has to beat.",
    ),
    "fedavg": Note(
        "nothing",
        "clients are alike, or one model for everybody is wanted. Where clients have different labels, one model "
        "must lose against each client's own.",
    ),
    "fedavg-ft": Note(
        "nothing",
        "clients are nearly alike and each has enough data for an epoch of its own. Try it first: it costs no more "
        "than FedAvg.",
    ),
    "fedprox": Note(
        "nothing",
        "one model for everybody is wanted, and clients take so many local steps that their models drift apart. Too "
        "large a mu holds the model where it is: `coterie plan` says so.",
    ),
    "fedprox-ft": Note("nothing", "FedProx would be used, and each client may fine-tune the model for itself."),
    "moon": Note(
        "its model of the last round",
        "one model for everybody is wanted, from clients whose features drift apart, and two more forward passes a "
        "step are no matter. It was made for deep networks on images.",
    ),
    "scaffold": Note(
        "its control variate",
        "one model for everybody is wanted from clients that differ, all take part often, and twice the bytes are no "
        "matter.",
    ),
    "fedpa-ft": Note(
        "nothing",
        "a round has many local steps, near enough to a minimum that the iterates tell how sure a client is of each "
        "direction. With few steps, its samples say little and FedAvg with fine-tuning is better.",
    ),
    "fedep-ft": Note(
        "its site of the posterior",
        "clients are sure of different parameters, and a model that weighs each by its curvature is to be fine-tuned.",
    ),
    "qlsd-ft": Note(
        "nothing",
        "bytes are scarce: a message has one byte for each number. The noise is that of a posterior sample.",
    ),
    "fedbn": Note(
        "its normalisation layers",
        "inputs differ from client to client (scanners, cameras, laboratories) while labels mean the same, and the "
        "model has normalisation layers.",
    ),
    "fedper": Note(
        "its head", "labels differ from client to client, while what is to be seen in the inputs is common."
    ),
    "fedrep": Note(
        "its head", "FedPer would be used, and a head has few parameters, so that it is quickly trained anew."
    ),
    "fedbabu": Note(
        "the initial head, which never changes",
        "new clients will come: the aim is a body that every client fine-tunes for a few epochs.",
    ),
    "lg-fedavg": Note(
        "its body",
        "inputs differ from client to client, or bytes are scarce: only the head is sent. It does little harm where "
        "clients have nothing in common, since a head is all that they share.",
    ),
    "fedrod": Note(
        "its second head",
        "both one good model for everybody and personal ones are wanted, from clients with very different labels.",
    ),
    "fedpac": Note(
        "nothing; the server keeps its head",
        "labels differ, and some clients are so alike that they should share a head too.",
    ),
    "fedcp": Note(
        "its head",
        "single examples differ in how much of them is common: the split between the shared head and the own one is "
        "made for each.",
    ),
    "gpfl": Note(
        "its head",
        "labels differ, and clients with few examples of a class shall learn from everybody's embedding of it.",
    ),
    "fedproto": Note(
        "its model",
        "models are not to be sent: only class means cross the wire. It helps clients that are alike more than those "
        "with few classes each.",
    ),
    "pfedvmp": Note(
        "its head",
        "FedPer would be used, clients have few examples of some classes, and the features' covariances may be sent.",
    ),
    "pfedgp": Note(
        "its own examples, which are part of its predictor",
        "clients have few examples, and it matters how sure a prediction is. A step costs the cube of the number of "
        "examples.",
    ),
    "fedmap": Note(
        "its model",
        "each client trains for long in a round, and what the others learned shall hold it back only where its own "
        "data say little.",
    ),
    "fedamp": Note("its model", "some clients are much more alike than others, and nobody knows which."),
    "heurfedamp": Note("its model", "FedAMP would be used, with deep networks, whose distances say little."),
    "fedfomo": Note(
        "its model, and the one that its last round began at",
        "some clients are much more alike than others, and each has examples to spare to find out whose models help.",
    ),
    "federico": Note(
        "nothing; the server, or a peer, keeps its model",
        "some clients are much more alike than others, and there may be no server: messages go from client to client.",
    ),
    "fedem": Note(
        "the proportions of its mixture",
        "every client's data mix the same few distributions, and several times the work and the bytes are no matter.",
    ),
    "ifca": Note("nothing", "clients fall into a few groups, and about how many is known."),
    "clustered-fl": Note(
        "nothing",
        "clients fall into groups whose number is not known, and all take part in every round. It is FedAvg until it "
        "splits.",
        sent="each its cluster's",
    ),
    "pfedbred": Note(
        "its model, and its w_i of the last round",
        "bytes are dearer than work: it takes several steps on each minibatch, and gains most where rounds are few "
        "and short.",
    ),
    "pfedme": Note(
        "its model",
        "pFedBreD's simplest case is enough: personal models about a common one, with several steps on each minibatch.",
    ),
    "pfedbayes": Note(
        "its posterior: a mean and a variance for each weight",
        "clients have few examples, and the spread of the weights is wanted too.",
    ),
    "ditto": Note(
        "its model",
        "a FedAvg model and personal ones are both wanted, and twice the work is no matter; lambda goes from local "
        "training to the common model.",
    ),
    "apfl": Note(
        "its model and its mixing weight",
        "nobody knows whether clients gain from each other: the weight between the own and the common model is "
        "learned, so that it seldom does worse than local training.",
    ),
    "fedala": Note(
        "its model and a weight for each parameter of the mixed layers",
        "the upper layers should be personal, and how much of the common ones a client takes up shall be learned.",
    ),
    "per-fedavg": Note(
        "nothing",
        "clients shall adapt a common model with one or a few gradient steps, newcomers with few examples above all.",
    ),
}
