"""Attention and its replacements, state space models, audio, time series."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, first_tensor, squares

TABLE = Table("sequences")
xt = TABLE.package("x-transformers")
performer = TABLE.package("performer-pytorch")
linformer = TABLE.package("linformer")
reformer = TABLE.package("reformer-pytorch")
mamba = TABLE.package("mambapy")
conformer = TABLE.package("conformer")
local = TABLE.package("local-attention")
experts = TABLE.package("mixture-of-experts")
soft = TABLE.package("soft-moe-pytorch")
perceiver = TABLE.package("perceiver-pytorch")
mingru = TABLE.package("minGRU-pytorch", "minGRU_pytorch")
s5 = TABLE.package("s5-pytorch", "s5")
itransformer = TABLE.package("iTransformer")
nystrom = TABLE.package("nystrom-attention")
mega = TABLE.package("mega-pytorch")
titans = TABLE.package("titans-pytorch")
sru = TABLE.package("sru")
gmlp = TABLE.package("g-mlp-pytorch")
axial = TABLE.package("axial-attention")
crf = TABLE.package("pytorch-crf", "torchcrf")

TOKENS, LENGTH = 20, 8


def text(model: nn.Module, length: int = LENGTH) -> Subject:
    """Tokens in, logits for the next one out."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = first_tensor(model(ids))
        wanted = ids[:, 1:]
        found = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), wanted, reduction="none"
        )
        return found.mean(1)

    return Subject(model, loss, torch.randint(0, TOKENS, (N, length)))


def vectors(model: nn.Module, width: int = 8, length: int = LENGTH) -> Subject:
    """A sequence of vectors."""
    return Subject(model, squares, torch.randn(N, length, width))


@xt("decoder", {})
@xt("decoder, rotary and RMS norm", {"rotary_pos_emb": True, "use_rmsnorm": True})
@xt("decoder, ALiBi", {"alibi_pos_bias": True})
@xt("decoder, gated feed-forward", {"ff_glu": True, "ff_swish": True})
@xt("decoder, T5 position bias", {"rel_pos_bias": True})
@xt("decoder, memory keys and values", {"attn_num_mem_kv": 2})
@xt("decoder, query-key norm", {"attn_qk_norm": True})
@xt("decoder, talking heads", {"attn_pre_talking_heads": True})
@xt("decoder, gated residual", {"gate_residual": True})
@xt("decoder, one key-value head", {"attn_one_kv_head": True})
@xt("decoder, macaron", {"macaron": True})
@xt("decoder, dynamic position bias", {"dynamic_pos_bias": True})
def decoder(more: dict[str, Any]) -> Subject:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **more)
    return text(TransformerWrapper(num_tokens=TOKENS, max_seq_len=16, attn_layers=layers))


@performer("PerformerLM")
def performer_lm() -> Subject:
    from performer_pytorch import PerformerLM

    return text(
        PerformerLM(
            num_tokens=TOKENS,
            max_seq_len=LENGTH,
            dim=16,
            depth=1,
            heads=2,
            dim_head=8,
            causal=False,
            nb_features=8,
        )
    )


@linformer("LinformerLM")
def linformer_lm() -> Subject:
    from linformer import LinformerLM

    return text(LinformerLM(TOKENS, 16, LENGTH, 2, k=4, heads=2))


@reformer("ReformerLM, full attention", {"use_full_attn": True})
def reformer_lm(more: dict[str, Any]) -> Subject:
    from reformer_pytorch import ReformerLM

    return text(
        ReformerLM(
            num_tokens=TOKENS,
            dim=16,
            depth=1,
            max_seq_len=LENGTH,
            heads=2,
            bucket_size=4,
            n_hashes=2,
            causal=True,
            **more,
        )
    )


@mamba("Mamba, parallel scan", True)
@mamba("Mamba, sequential scan", False)
def mamba_py(pscan: bool) -> Subject:
    from mambapy.mamba import Mamba, MambaConfig

    return vectors(Mamba(MambaConfig(d_model=8, n_layers=2, d_state=4, pscan=pscan)))


@conformer("Conformer")
def conformer_block() -> Subject:
    from conformer import Conformer

    return vectors(Conformer(8, depth=2, dim_head=4, heads=2, ff_mult=2, conv_kernel_size=3))


@local("LocalTransformer")
def local_transformer() -> Subject:
    from local_attention import LocalTransformer

    return text(
        LocalTransformer(
            num_tokens=TOKENS,
            dim=16,
            depth=2,
            max_seq_len=16,
            local_attn_window_size=4,
            heads=2,
            dim_head=8,
            causal=True,
        )
    )


@experts("MoE, capacity shared by the batch")
def mixture() -> Subject:
    from mixture_of_experts import MoE

    return vectors(MoE(dim=8, num_experts=4))


@soft("SoftMoE")
def soft_moe() -> Subject:
    from soft_moe_pytorch import SoftMoE

    return vectors(SoftMoE(dim=8, seq_len=LENGTH, num_experts=4))


@perceiver("Perceiver", "Perceiver")
@perceiver("PerceiverIO", "PerceiverIO")
def perceived(name: str) -> Subject:
    import perceiver_pytorch

    if name == "Perceiver":
        model = perceiver_pytorch.Perceiver(
            input_channels=8, input_axis=1, num_freq_bands=2, max_freq=4.0, depth=2, num_latents=5,
            latent_dim=8, cross_heads=1, latent_heads=2, cross_dim_head=4, latent_dim_head=4,
            num_classes=3, weight_tie_layers=True,
        )  # fmt: skip
    else:
        model = perceiver_pytorch.PerceiverIO(
            dim=8, queries_dim=8, depth=2, num_latents=5, latent_dim=8, cross_heads=1,
            latent_heads=2, cross_dim_head=4, latent_dim_head=4,
        )  # fmt: skip
    return vectors(model)


@mingru("minGRU", "minGRU")
def minimal(name: str) -> Subject:
    import minGRU_pytorch

    return vectors(getattr(minGRU_pytorch, name)(dim=8))


@s5("S5")
def s_five() -> Subject:
    from s5 import S5

    return vectors(S5(8, 8))


@itransformer("iTransformer", {})
@itransformer("iTransformer, reversible norm", {"use_reversible_instance_norm": True})
def inverted(more: dict[str, Any]) -> Subject:
    from iTransformer import iTransformer

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = iTransformer(
                num_variates=5, lookback_len=LENGTH, dim=8, depth=1, heads=2, dim_head=4,
                pred_length=3, num_tokens_per_variate=1, **more,
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return first_tensor(self.net(x))

    return vectors(Net(), width=5)


@nystrom("Nystromformer")
def nystromformer() -> Subject:
    from nystrom_attention import Nystromformer

    return vectors(Nystromformer(dim=8, dim_head=4, heads=2, depth=1, num_landmarks=4))


@mega("Mega")
def mega_lm() -> Subject:
    from mega_pytorch import Mega

    model = Mega(
        num_tokens=TOKENS, dim=16, depth=1, ema_heads=4, attn_dim_qk=8, attn_dim_value=16,
        laplacian_attn_fn=True,
    )  # fmt: skip
    return text(model)


@titans("NeuralMemory")
def neural_memory() -> Subject:
    from titans_pytorch import NeuralMemory

    return vectors(NeuralMemory(dim=8, chunk_size=4, heads=1))


@sru("SRU")
def simple_recurrent() -> Subject:
    import sru

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = sru.SRU(8, 8, num_layers=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.transpose(0, 1))[0].transpose(0, 1)

    return vectors(Net())


@gmlp("gMLP")
def g_mlp() -> Subject:
    from g_mlp_pytorch import gMLP

    return text(gMLP(num_tokens=TOKENS, dim=16, depth=2, seq_len=LENGTH, causal=True))


@axial("AxialAttention")
def axial_attention() -> Subject:
    from axial_attention import AxialAttention

    model = AxialAttention(dim=8, dim_index=1, heads=2, num_dimensions=2)
    return Subject(model, squares, torch.randn(N, 8, 4, 5))


@crf("CRF on an LSTM")
def linear_chain() -> Subject:
    from torchcrf import CRF

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(TOKENS, 8), nn.LSTM(8, 8, batch_first=True)
            self.out, self.crf = nn.Linear(8, 4), CRF(4, batch_first=True)

        def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
            return -self.crf(self.out(self.rnn(self.embed(ids))[0]), tags, reduction="none")

    batch = torch.randint(0, TOKENS, (N, LENGTH)), torch.randint(0, 4, (N, LENGTH))
    return Subject(Net(), lambda model, batch: model(*batch), batch)
