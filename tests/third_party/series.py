"""Time series and audio."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, squares

TABLE = Table("time series and audio")
tsai = TABLE.package("tsai")
asteroid = TABLE.package("asteroid")
nnaudio = TABLE.package("nnAudio")
forecast = TABLE.package("neuralforecast")
encodec = TABLE.package("encodec")

LENGTH = 24


@tsai("InceptionTime", "InceptionTime.InceptionTime", {"nf": 4})
@tsai("ResNet", "ResNet.ResNet", {})
@tsai("FCN", "FCN.FCN", {"layers": [4, 8, 4]})
@tsai(
    "LSTM-FCN", "RNN_FCN.LSTM_FCN", {"hidden_size": 8, "conv_layers": [4, 8, 4], "seq_len": LENGTH}
)
@tsai("TST", "TST.TST", {"seq_len": LENGTH, "d_model": 8, "n_heads": 2, "d_ff": 8, "n_layers": 1})
@tsai("TCN", "TCN.TCN", {"layers": [4, 4]})
@tsai("XceptionTime", "XceptionTime.XceptionTime", {"nf": 4})
@tsai(
    "OmniScaleCNN",
    "OmniScaleCNN.OmniScaleCNN",
    {"seq_len": LENGTH, "layers": [8 * 16, 5 * 32, 2 * 16]},
)
@tsai("mWDN", "mWDN.mWDN", {"seq_len": LENGTH, "levels": 2})
@tsai("gMLP", "gMLP.gMLP", {"seq_len": LENGTH, "d_model": 8, "d_ffn": 8, "depth": 1})
@tsai("XCM", "XCM.XCM", {"seq_len": LENGTH, "nf": 4})
@tsai("TSiT", "TSiTPlus.TSiTPlus", {"seq_len": LENGTH, "d_model": 8, "n_heads": 2, "depth": 1})
@tsai(
    "MiniRocket features",
    "MINIROCKETPlus_Pytorch.MiniRocketPlus",
    {"seq_len": LENGTH, "num_features": 84},
)
def series(path: str, more: dict[str, Any]) -> Subject:
    import importlib

    module, name = path.split(".")
    kind = getattr(importlib.import_module(f"tsai.models.{module}"), name)
    return Subject(kind(3, 2, **more), squares, torch.randn(N, 3, LENGTH))


@asteroid(
    "ConvTasNet",
    "ConvTasNet",
    {"n_blocks": 2, "n_repeats": 1, "bn_chan": 8, "hid_chan": 8, "skip_chan": 8, "n_filters": 16},
)
@asteroid(
    "DPRNNTasNet",
    "DPRNNTasNet",
    {"n_repeats": 1, "bn_chan": 8, "hid_size": 8, "chunk_size": 10, "n_filters": 16},
)
@asteroid(
    "DPTNet",
    "DPTNet",
    {"n_repeats": 1, "n_heads": 2, "ff_hid": 8, "chunk_size": 10, "n_filters": 16},
)
@asteroid(
    "SuDORMRFNet",
    "SuDORMRFNet",
    {"bn_chan": 8, "num_blocks": 1, "upsampling_depth": 2, "n_filters": 16},
)
def separation(name: str, more: dict[str, Any]) -> Subject:
    from asteroid import models

    return Subject(getattr(models, name)(n_src=2, **more), squares, torch.randn(N, 400))


@nnaudio("trainable STFT", "STFT", {"n_fft": 64, "trainable": True, "output_format": "Magnitude"})
@nnaudio(
    "trainable Mel spectrogram",
    "MelSpectrogram",
    {"n_fft": 64, "n_mels": 8, "trainable_mel": True, "trainable_STFT": True, "sr": 800},
)
@nnaudio(
    "trainable constant-Q", "CQT1992v2", {"sr": 800, "fmin": 50, "n_bins": 6, "trainable": True}
)
def spectrum(name: str, more: dict[str, Any]) -> Subject:
    from nnAudio import features

    return Subject(getattr(features, name)(verbose=False, **more), squares, torch.randn(N, 400))


@encodec("encoder and decoder")
def codec() -> Subject:
    from encodec.modules import SEANetDecoder, SEANetEncoder

    more: dict[str, Any] = {
        "dimension": 8,
        "n_filters": 2,
        "ratios": [4, 2],
        "lstm": 1,
        "n_residual_layers": 1,
    }
    return Subject(
        nn.Sequential(SEANetEncoder(**more), SEANetDecoder(**more)), squares, torch.randn(N, 1, 64)
    )


FORECASTERS = (
    "NBEATS", "NHITS", "MLP", "TSMixer", "DLinear", "NLinear", "PatchTST", "TiDE", "KAN", "BiTCN",
    "TCN", "LSTM", "GRU", "DeepAR", "TFT", "TimeMixer", "VanillaTransformer", "Informer",
    "Autoformer", "FEDformer", "TimesNet", "DeepNPTS",
)  # fmt: skip


def forecaster(name: str) -> Subject:
    import logging

    from neuralforecast import models

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    more: dict[str, Any] = {"h": 4, "input_size": LENGTH, "max_steps": 1}
    if name in ("TSMixer", "TimeMixer"):
        more["n_series"] = 1
    if name in (
        "PatchTST",
        "TFT",
        "VanillaTransformer",
        "Informer",
        "Autoformer",
        "FEDformer",
        "TimesNet",
    ):
        more["hidden_size"] = 16
    if name in ("PatchTST", "VanillaTransformer", "Informer", "Autoformer"):
        more["n_head"] = 2
    model = getattr(models, name)(**more)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        batch = {"insample_y": x, "insample_mask": torch.ones_like(x), "futr_exog": None,
                 "hist_exog": None, "stat_exog": None}  # fmt: skip
        out = model(batch)
        return (out[0] if isinstance(out, tuple) else out).flatten(1).square().mean(1)

    limit = "numbers of the whole batch leave torch by .numpy()" if name == "TimesNet" else ""
    return Subject(model, loss, torch.randn(N, LENGTH, 1), limit=limit)


for _name in FORECASTERS:
    forecast(_name, _name)(forecaster)
