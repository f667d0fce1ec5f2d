"""A launch whose plan does not fit it ends with an error."""

import pytest

from tests.emulation.emulator import IsolatedModule, run
from tests.support.cases import make_case


@pytest.fixture(scope="module")
def module_class():
    return IsolatedModule


FAMILIES = pytest.mark.parametrize("family, num_heads", [("hopper", 16), ("hopper", 80), ("portable", 16)])


@FAMILIES
@pytest.mark.parametrize("planned, launched", [(6, 4), (4, 6)])
def test_a_plan_for_another_number_of_ctas_is_an_error(decoder, family, num_heads, planned, launched):
    """As when a graph that was captured on fewer or more multiprocessors is replayed."""
    case = make_case([200, 70], [1, 1], num_heads=num_heads, page_size=8, device="cpu")
    implementation = decoder(case, family, 6)
    plans = implementation._plans.clone()
    implementation._plans = plans[:launched]
    plan = implementation.plan(case.batch)
    implementation._plans = plans[:planned]
    implementation.plan(case.batch)
    implementation._plans = plans[:launched]  # the launch is as it was captured
    with pytest.raises(AssertionError, match="the plan is for another number of CTAs"):
        run(implementation, case, plan=plan)


@FAMILIES
def test_a_plan_that_a_graph_has_replaced_is_an_error(decoder, family, num_heads):
    case = make_case([200, 70], [1, 1], num_heads=num_heads, page_size=8, device="cpu")
    implementation = decoder(case, family, 4)
    plan = implementation.plan(case.batch)
    implementation.plan(case.batch)  # as by a replay: the host still takes the first plan for the last one
    with pytest.raises(AssertionError, match="the plan is another one"):
        run(implementation, case, plan=plan)
