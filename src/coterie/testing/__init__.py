"""How to test a method of your own: twelve laws that hold for every method, and the kit they are made of.

    from coterie.testing import check

    def test_my_method():
        check(MyMethod())

`check` runs your method on a small federation (four clients of different sizes, a network with BatchNorm and dropout)
and raises one `LawBroken` that lists every law it breaks:

     1  clients that are stacked get what each would get alone (to float tolerance)
     2  peers on the complete graph, each with its own copy of the server, do what one server does (to tolerance)
     3  no function modifies what it is given
     4  every option changes the result, and beside every option the method learns where learning is easy
     5  masked examples and masked steps change nothing
     6  clients in another order get the same results in that order
     7  states and messages survive being packed, written and read again, bit for bit
     8  a client's update depends on its own data only
     9  alone and after one round, a client deploys what its local solver made
    10  a run that was killed and resumed equals one that was not, bit for bit, compiled or not
    11  the number of workers changes nothing, bit for bit, be they processes or threads
    12  every engine agrees with one client at a time: compiled, repeated by C++, threads, processes, lanes

`examine(method)` yields a `Row` a law (number, name, outcome, words) instead of raising, and `coterie laws
package.module:Class` prints them as a table. Laws 10 to 12 compile the method's steps, which takes seconds for each; a
step that cannot be compiled here is run as it is, and the row says so, as does law 11's if threads had nothing to
share.

**A law that does not apply.** Some methods break a law for a reason. A mixture that deploys neither of its two models,
for instance, cannot keep law 9. Such a method says why:

    class Mixture(Method):
        exempt = {9: "a client deploys a mixture of its own model and the server's, so neither of the two alone"}

The law is then reported as "does not apply", with the reason. A number that is no law, or an empty reason, is an error.

**Options that need company.** Law 4 changes one option at a time. One that matters only beside another (the step size
of an option that is off by default) needs a context in which it does:

    class MyMethod(Method):
        law_contexts = ({"attention": "scad"},)

Laws 1 and 4 are then asked in this context, too.

**Settings that need not learn.** The second half of law 4 trains the defaults, every choice of every option and nearby
numbers (`settings`) on an easy federation with SGD of step size 0.1 (`coterie.testing.learning`). A setting that is not
meant to learn within these ten rounds of eight steps says why, under "option = value", an option's name, or "defaults":

    class MyMethod(Method):
        not_meant_to_learn = {"local_work = gradient": "it takes one step a round, and so needs more rounds"}

It is then left out of this half, and the row of law 4 says so with the reason.

**Tests of your own.** `simulate(method, engine, rounds)` trains on the laws' federation and returns the simulation,
`views` and `result` read it, `same(a, b, complaint, tolerance)` compares trees and names the leaf that differs, and
`federation`, `module`, `task` and `batches` are the pieces, to call a method's functions by hand. `learn(method)`
trains on the easy federation and returns accuracy and loss after the first round and after the last.
"""

from coterie.testing.engine_laws import (
    ADAM_ROUNDING,
    CALLED,
    COMPILED,
    NO_PROCESSES,
    REFUSED,
    REPEATED,
    ROUNDING,
    engines_agree,
    stacking_changes_nothing,
)
from coterie.testing.kit import (
    LOOP,
    PLAN,
    SIZES,
    STACKED,
    DoesNotApply,
    KillAfter,
    Killed,
    LawBroken,
    batches,
    federation,
    module,
    result,
    same,
    simulate,
    task,
    views,
    without_times,
)
from coterie.testing.laws import LAWS, Law, Row, check, examine, exemptions
from coterie.testing.learning import Learned, easy_federation, easy_task, every_setting_learns, learn
from coterie.testing.method_laws import options_change_the_result
from coterie.testing.options import changed, contexts, plain, settings, variants

__all__ = [
    "ADAM_ROUNDING",
    "CALLED",
    "COMPILED",
    "LAWS",
    "LOOP",
    "NO_PROCESSES",
    "PLAN",
    "REFUSED",
    "REPEATED",
    "ROUNDING",
    "SIZES",
    "STACKED",
    "DoesNotApply",
    "KillAfter",
    "Killed",
    "Law",
    "LawBroken",
    "Learned",
    "Row",
    "batches",
    "changed",
    "check",
    "contexts",
    "easy_federation",
    "easy_task",
    "engines_agree",
    "every_setting_learns",
    "examine",
    "exemptions",
    "federation",
    "learn",
    "module",
    "options_change_the_result",
    "plain",
    "result",
    "same",
    "settings",
    "simulate",
    "stacking_changes_nothing",
    "task",
    "variants",
    "views",
    "without_times",
]
