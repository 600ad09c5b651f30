"""Modules of published packages, with the arguments that they take; chosen before any was run."""

from __future__ import annotations

import torch
from reach_functions import Reached, loss

GRAPH = "5 4, 2 8 :index=5"


def graph(name: str, *init: object, **made: object) -> Reached:
    return Reached("torch_geometric", f"torch_geometric.nn:{name}", GRAPH, init=init, made=made)


def transformer(name: str, *init: object, spec: str = "b s 8", **made: object) -> Reached:
    path = f"x_transformers.x_transformers:{name}"
    return Reached("x-transformers", path, spec, init=init, made=made)


def flow(path: str, *init: object, **made: object) -> Reached:
    return Reached("nflows", f"nflows.transforms:{path}", "b 4 :probability", init=init, made=made)


MODULES = [
    Reached("einops", "einops.layers.torch:Rearrange", "b 4 d", init=("b (s t) d -> b s t d",),
            made={"t": 2}),
    Reached("einops", "einops.layers.torch:Reduce", "b s d", init=("b s d -> b d", "mean")),
    Reached("einops", "einops.layers.torch:EinMix", "b s 4", init=("b s d -> b s e",),
            made={"weight_shape": "d e", "bias_shape": "e", "d": 4, "e": 3}),
    transformer("RMSNorm", 8),
    transformer("ScaleNorm", 8),
    transformer("SimpleRMSNorm", 8),
    transformer("LayerNorm", 8),
    transformer("FeedForward", 8),
    transformer("Attention", 8, heads=2, dim_head=4, causal=True),
    transformer("Encoder", dim=8, depth=1, heads=2, attn_dim_head=4),
    transformer("Decoder", dim=8, depth=1, heads=2, attn_dim_head=4),
    graph("GCNConv", 4, 3),
    graph("SAGEConv", 4, 3),
    graph("GATConv", 4, 3),
    graph("GraphConv", 4, 3),
    graph("TAGConv", 4, 3),
    loss("ContrastiveLoss"),
    loss("TripletMarginLoss"),
    loss("NTXentLoss"),
    loss("MultiSimilarityLoss"),
    loss("CircleLoss"),
    loss("ArcFaceLoss", num_classes=3, embedding_size=4),
    flow("LULinear", 4),
    flow("QRLinear", 4, 2),
    flow("HouseholderSequence", 4, 2),
    flow("PiecewiseRationalQuadraticCDF", [4]),
    Reached("normflows", "normflows.flows:Planar", "b 4", init=((4,),)),
    Reached("normflows", "normflows.flows:Radial", "b 4", init=((4,),)),
    Reached("normflows", "normflows.nets:MLP", "b 4", init=([4, 6, 2],)),
    Reached("vector-quantize-pytorch", "vector_quantize_pytorch:FSQ", "b s 3", init=([5, 5, 5],)),
    Reached("vector-quantize-pytorch", "vector_quantize_pytorch:LFQ", "b s 4", made={"dim": 4,
            "codebook_size": 16}, init=()),
    Reached("e3nn", "e3nn.o3:Linear", "b 7", init=("1x0e+2x1o", "2x0e+1x1o")),
    Reached("e3nn", "e3nn.o3:Norm", "b 6", init=("2x1o",)),
    Reached("e3nn", "e3nn.nn:Gate", "b 6", init=("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o")),
]  # fmt: skip
