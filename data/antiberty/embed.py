"""Embed antibody sequences and fill masked residues with AntiBERTy."""

import hashlib

import torch
from antiberty import AntiBERTyRunner

SEQUENCES = [
    # trastuzumab, heavy and light variable domains
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    # AntiBERTy's own example
    "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPYCSSISCNDGFDIWGQGTMVTVS",
    "DVVMTQTPFSLPVSLGDQASISCRSSQSLVHSNGNTYLHWYLQKPGQSPKLLIYKVSNRFSGVPDRFSGSGSGTDFTLKISRVEAEDLGVYFCSQSTHVPYTFGGGTKLEIK",
]

torch.manual_seed(0)
runner = AntiBERTyRunner()
digest = hashlib.sha256()
for sequence in SEQUENCES:
    (embedding,) = runner.embed([sequence])
    digest.update(embedding.numpy().tobytes())
    masked = "".join("_" if i % 9 == 4 else c for i, c in enumerate(sequence))
    filled = runner.fill_masks([masked])[0]
    print(sum(a == b for a, b in zip(filled, sequence, strict=True)) / len(sequence), len(sequence))
    digest.update(filled.encode())
batch = runner.embed(SEQUENCES, hidden_layer=4)
for e in batch:
    digest.update(e.numpy().tobytes())
digest.update(torch.rand(8).numpy().tobytes())
print("sha256", digest.hexdigest())
