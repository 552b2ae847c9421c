"""Section A: start-up, authentication, sessions."""

from conformance.check import check, expect
from conformance.target import Target

_START = ["client/config", "client/dynamic_config", "create_session", "create_model", "retrieve_future", "get_info"]


@check("C1", "A fresh client and create_lora_training_client ask the documented endpoints and succeed")
def c1_start(target: Target) -> str:
    """The endpoints that the SDK asks, in order of their first use."""
    proxy = target.proxy()
    training = target.training(target.service(proxy))
    asked = list(dict.fromkeys(exchange.route for exchange in proxy.exchanges))
    missing = [route for route in _START if route not in asked]
    expect(not missing, f"the SDK did not ask {missing}; it asked {asked}")
    failed = [f"{one.route} {one.status}" for one in proxy.exchanges if one.status not in (200, 408)]
    expect(not failed, f"answered with other than 200: {failed}")
    return f"{len(asked)} endpoints, model {training.model_id}"
