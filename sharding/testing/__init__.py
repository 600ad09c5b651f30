"""Tools for property-based tests of sharded code: strategies of meshes and specs, and a check.

Needs hypothesis (``pip install 'torchard[hypothesis]'``). ``check_sharded`` compares a function run by
``shard`` with the function itself (`check.py`); ``meshes`` and ``specs`` are the strategies that feed it
(`strategies.py`); `shards.py` defines shards by indexing, independently of the library::

    @given(st.data())
    def test_mine(data):
        mesh = data.draw(meshes())
        spec = data.draw(specs(x.shape, mesh))
        check_sharded(mine, (x,), mesh, (spec,))
"""

from torchard.sharding.testing.check import check_sharded
from torchard.sharding.testing.shards import combined, contributions, shard_at, whole_of
from torchard.sharding.testing.strategies import layouts, meshes, random_spec, specs

__all__ = [
    "check_sharded",
    "combined",
    "contributions",
    "layouts",
    "meshes",
    "random_spec",
    "shard_at",
    "specs",
    "whole_of",
]
