"""Usage with costs: in `GET usage`, in `fovea usage` and in the billing events that the SDK reads."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import tinker

from fovea_gateway.access.api_keys import Scope
from fovea_gateway.access.owners import Usage, Used, add_usage
from fovea_gateway.fronts.administration import billing_events
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.test_owners import command

HOUR = 3600.0
WORK = Usage(
    trained_tokens=600, scored_tokens=100, prompt_tokens=200, cached_tokens=50, sampled_tokens=150, gpu_seconds=HOUR
)


@pytest.fixture
async def admin(stand: Stand) -> str:
    """An administrator's key, after an hour of use of each of alice's two keys and half an hour of bob's."""
    await stand.stop()
    await stand.start(gpu_hour_price_usd=2.0)
    assert stand.gateway is not None
    half = Usage(sampled_tokens=10, gpu_seconds=HOUR / 2)
    used = [Used("alice", "k1", WORK), Used("alice", "k2", WORK), Used("bob", "k3", half)]
    now = datetime.now(UTC).timestamp()
    await stand.gateway.components.database.write(lambda connection: add_usage(connection, used, now))
    return (await stand.gateway.components.keys.create("root", "", Scope.ADMIN, None))[0]


async def test_usage_shows_the_price(stand: Stand, admin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand.http(admin) as http:
        found = (await http.get("usage?owner=*")).json()
    assert found["gpu_hour_price_usd"] == 2.0
    monkeypatch.setenv("FOVEA_GATEWAY_GPU_HOUR_PRICE_USD", "2.0")
    printed = [line.split() for line in (await command(stand, "usage")).splitlines()]
    assert [row[-1] for row in printed] == ["USD", "2.00", "2.00", "1.00"]
    monkeypatch.delenv("FOVEA_GATEWAY_GPU_HOUR_PRICE_USD")
    assert "COST" not in await command(stand, "usage")


async def test_the_sdk_reads_billing_events(stand: Stand, admin: str) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    client = await asyncio.to_thread(tinker.AdminClient, base_url=stand.url, api_key=admin)
    events = (await client.get_billing_usage(today - timedelta(1), today + timedelta(1))).data
    costs: dict[str, float] = {}
    for event in events:
        assert (event.bucket_start, event.bucket_end) == (today, today + timedelta(1))
        costs[event.user_id or ""] = costs.get(event.user_id or "", 0.0) + (event.estimated_cost_usd or 0.0)
    assert costs == pytest.approx({"alice": 4.0, "bob": 1.0})
    kinds = [
        (one.event_info.type, getattr(one.event_info, "token_count", 0)) for one in events if one.user_id == "alice"
    ]
    assert kinds == [
        ("training", 1400), ("sampling_prefill", 300), ("sampling_sample", 300), ("sampling_prefill", 100),
    ]  # fmt: skip
    rates = {one.effective_rate_usd_per_million_tokens for one in events if one.user_id == "alice"}
    assert sorted(rate or 0.0 for rate in rates) == pytest.approx([0.0, 4.0 / 2000 * 1e6])
    assert (await client.get_billing_usage(today - timedelta(3), today)).data == []
    with pytest.raises(tinker.BadRequestError, match="must be midnight in UTC"):
        await client.get_billing_usage(today + timedelta(hours=1), today + timedelta(2))
    with pytest.raises(tinker.BadRequestError, match=r"1 \.\. 14 days after"):
        await client.get_billing_usage(today - timedelta(20), today)


def test_without_a_price_events_have_no_costs() -> None:
    row = vars(WORK) | {"day": "2026-01-31", "owner": "alice", "key_id": "k"}
    (first, *rest) = billing_events([row], 0.0)
    assert first == {
        "bucket_start": "2026-01-31T00:00:00+00:00", "bucket_end": "2026-02-01T00:00:00+00:00", "user_id": "alice",
        "user_name": "alice", "event_info": {"type": "training", "token_count": 700},
    }  # fmt: skip
    assert len(rest) == 3
    assert billing_events([], 2.0) == []
