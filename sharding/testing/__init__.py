"""Tools for property-based tests of sharded code: strategies of meshes and specs; shards by definition.

Needs hypothesis (``pip install 'torchard[hypothesis]'``). ``meshes`` and ``specs`` are strategies
(`strategies.py`); `shards.py` defines shards by indexing, independently of the library. Sharded functions
are compared by `torchard.testing.equal`::

    @given(st.data())
    def test_mine(data):
        mesh = data.draw(meshes())
        spec = data.draw(specs(x.shape, mesh))
        equal(shard(mine, mesh), mine, place(x, mesh, spec))
"""

from torchard.sharding.testing.shards import combined, contributions, shard_at, whole_of
from torchard.sharding.testing.strategies import layouts, meshes, random_spec, specs

__all__ = [
    "combined",
    "contributions",
    "layouts",
    "meshes",
    "random_spec",
    "shard_at",
    "specs",
    "whole_of",
]
