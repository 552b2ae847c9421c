"""A running Fovea listens only at the configured addresses."""

import psutil
import tinker

from tests.e2e.stack import Stack
from tests.listeners import listeners, unasked


def test_fovea_up_listens_where_it_is_asked_to(stack: Stack) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        sampling = training.save_weights_and_get_sampling_client().result()  # a push opens a group
        prompt = tinker.ModelInput.from_ints([1, 2, 3])
        sampling.sample(prompt, num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=1)).result()
        supervisor = psutil.Process(stack.state["pid"])
        everything = [supervisor, *supervisor.children(recursive=True)]
        services = stack.state["services"].values()
        asked = {service["address"] for service in services}
        asked |= {service["metrics"].removeprefix("http://").removesuffix("/metrics") for service in services}
        asked.add(stack.base_url.removeprefix("http://"))
        assert asked <= listeners(everything).keys()
        assert not unasked(everything, asked)
