import os

# Some virtual machines list AMX among the processor's features and do not run it: products in
# bfloat16 then end plain torch with "illegal instruction". oneDNN reads this before its first one.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
