"""More kinds of attention, of experts and of memory, on sequences and images."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from tests.models import Fn

from .subject import N, Subject, Table, first_tensor, squares

TABLE = Table("attention")
SMALL = {"heads": 2, "dim_head": 4}


def _mean(s: Any, *inputs: Tensor) -> Tensor:
    """The first result, over all axes but samples and features."""
    out = first_tensor(s.net(*inputs))
    return out.flatten(1)[:, :12]


def _built(module: str, name: str, inputs: Any, **arguments: Any) -> Subject:
    net = getattr(importlib.import_module(module), name)(**arguments)
    return Subject(Fn(_mean, net=net), squares, inputs())


def added(table: Table) -> Any:
    """A function that adds a row to a table: a class of a module with these arguments."""

    def add(
        package: str, module: str, name: str, inputs: Any, *, called: str = "", **arguments: Any
    ) -> None:
        title = f"{name}, {called}" if called else name
        table.package(package, module)(title, module, name, inputs, **arguments)(_built)

    return add


add = added(TABLE)


def vectors(*shapes: tuple[int, ...]) -> Any:
    return lambda: tuple(torch.randn(N, *shape) for shape in shapes)


def tokens(length: int) -> Any:
    return lambda: (torch.randint(0, 16, (N, length)),)


LINES, TEXT = vectors((5, 8)), {"num_tokens": 16, "dim": 8}
IMAGE = {"dim": 8, "image_size": 8, "patch_size": 4}

add("isab-pytorch", "isab_pytorch", "ISAB", LINES, dim=8, heads=2, num_latents=3)
add("slot-attention", "slot_attention", "SlotAttention", LINES, num_slots=3, dim=8, iters=2)
add("slot-attention", "slot_attention", "MultiHeadSlotAttention", LINES, num_slots=3, dim=8,
    heads=2, iters=2)  # fmt: skip
add("st-moe-pytorch", "st_moe_pytorch", "MoE", LINES, dim=8, num_experts=4, gating_top_n=2,
    capacity_factor_train=4.0)  # fmt: skip
add("PEER-pytorch", "PEER_pytorch", "PEER", LINES, dim=8, heads=2, num_experts=16,
    num_experts_per_head=4, dim_key=4)  # fmt: skip
add("bidirectional-cross-attention", "bidirectional_cross_attention",
    "BidirectionalCrossAttention", vectors((5, 8), (7, 6)), dim=8, context_dim=6,
    **SMALL)  # fmt: skip
add("hourglass-transformer-pytorch", "hourglass_transformer_pytorch", "HourglassTransformerLM",
    tokens(16), max_seq_len=16, shorten_factor=2, depth=(1, 1, 1), **TEXT, **SMALL)  # fmt: skip
add("block-recurrent-transformer-pytorch", "block_recurrent_transformer_pytorch",
    "BlockRecurrentTransformer", tokens(16), depth=2, max_seq_len=16, block_width=8,
    num_state_vectors=4, recurrent_layers=(1,), use_compressed_mem=False, **TEXT,
    **SMALL)  # fmt: skip
add("recurrent-memory-transformer-pytorch", "recurrent_memory_transformer_pytorch",
    "RecurrentMemoryTransformer", tokens(8), num_memory_tokens=3, seq_len=8, depth=1, causal=True,
    **TEXT, **SMALL)  # fmt: skip
add("sinkhorn-transformer", "sinkhorn_transformer", "SinkhornTransformerLM", tokens(16), heads=2,
    depth=1, bucket_size=4, max_seq_len=16, **TEXT)  # fmt: skip
add("simple-hierarchical-transformer", "simple_hierarchical_transformer",
    "HierarchicalTransformer", tokens(16), depth=1, seq_len=16, hierarchies=(1, 2),
    window_sizes=(8, None), use_flash_attn=False, **TEXT, **SMALL)  # fmt: skip
add("megabyte-pytorch", "MEGABYTE_pytorch", "MEGABYTE", tokens(16), num_tokens=16, dim=(8, 8),
    max_seq_len=(4, 4), depth=(1, 1), flash_attn=False, **SMALL)  # fmt: skip
add("colt5-attention", "colt5_attention", "ConditionalRoutedFeedForward", vectors((12, 8)), dim=8,
    num_heavy_tokens=3, light_ff_mult=0.5, heavy_ff_mult=2)  # fmt: skip
add("agent-attention-pytorch", "agent_attention_pytorch", "AgentTransformer", LINES, dim=8,
    depth=1, num_agent_tokens=3, **SMALL)  # fmt: skip
add("infini-transformer-pytorch", "infini_transformer_pytorch", "InfiniTransformer", tokens(9),
    depth=1, use_mem_delta_rule=True, heads=2, dim_head=8, **TEXT)  # fmt: skip
add("gateloop-transformer", "gateloop_transformer", "Transformer", tokens(9), depth=1,
    use_gate_looped_attn=True, **TEXT)  # fmt: skip
add("gateloop-transformer", "gateloop_transformer", "SimpleGateLoopLayer", LINES, dim=8)
add("triangle-multiplicative-module", "triangle_multiplicative_module",
    "TriangleMultiplicativeModule", vectors((5, 5, 8)), dim=8, mix="ingoing")  # fmt: skip
add("hamburger-pytorch", "hamburger_pytorch", "Hamburger", vectors((8, 16)), dim=8, n=16, ratio=4,
    K=2)  # fmt: skip
add("glom-pytorch", "glom_pytorch", "Glom", vectors((3, 8, 8)), levels=3, **IMAGE)
add("halonet-pytorch", "halonet_pytorch", "HaloAttention", vectors((8, 8, 8)), dim=8,
    block_size=4, halo_size=2, **SMALL)  # fmt: skip
add("bottleneck-transformer-pytorch", "bottleneck_transformer_pytorch", "BottleStack",
    vectors((8, 8, 8)), dim=8, fmap_size=8, dim_out=8, proj_factor=2, downsample=True,
    rel_pos_emb=True, **SMALL)  # fmt: skip
add("timesformer-pytorch", "timesformer_pytorch", "TimeSformer", vectors((3, 3, 8, 8)),
    num_frames=3, num_classes=3, depth=1, **IMAGE, **SMALL)  # fmt: skip
add("res-mlp-pytorch", "res_mlp_pytorch", "ResMLP", vectors((3, 8, 8)), depth=2, num_classes=3,
    **IMAGE)  # fmt: skip
add("stam-pytorch", "stam_pytorch", "STAM", vectors((3, 3, 8, 8)), num_frames=3, space_depth=1,
    space_heads=2, space_mlp_dim=8, time_depth=1, time_heads=2, time_mlp_dim=8, num_classes=3,
    space_dim_head=4, time_dim_head=4, **IMAGE)  # fmt: skip
add("uformer-pytorch", "uformer_pytorch", "Uformer", vectors((3, 16, 16)), dim=8, stages=2,
    num_blocks=1, window_size=4, **SMALL)  # fmt: skip


@TABLE.package("invariant-point-attention", "invariant_point_attention")("points in frames")
def frames() -> Subject:
    from invariant_point_attention import InvariantPointAttention

    net = InvariantPointAttention(
        dim=8, heads=2, scalar_key_dim=4, scalar_value_dim=4, point_key_dim=2, point_value_dim=2,
        pairwise_repr_dim=4,
    )  # fmt: skip

    def f(s: Any, x: Tensor, pairs: Tensor, turned: Tensor, moved: Tensor) -> Tensor:
        return s.net(x, pairs, rotations=turned, translations=moved)

    turned, _ = torch.linalg.qr(torch.randn(N, 5, 3, 3))
    batch = (torch.randn(N, 5, 8), torch.randn(N, 5, 5, 4), turned, torch.randn(N, 5, 3))
    return Subject(Fn(f, net=net), squares, batch)
