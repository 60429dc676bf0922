"""What is learned and how: the tied module and all schemes, bodies, the exact loss, and the split of its gradient;
and the geometry of vocabulary matrices.

May import what stands at the root, but neither the config nor files.
"""

from tied_lm.door import door

__all__, __getattr__, __dir__ = door(
    __name__,
    {
        "embedding": "TiedEmbedding UntiedEmbedding VocabularyModel count_parameters",
        "schemes": "SCHEMES",
        "bodies": "BODIES Body",
        "likelihoods": "likelihood",
        "loss": "vocabulary_loss",
        "split": "GradientSplit loss_and_gradients row_stats split_gradients",
        "foreign": "embed_loss_and_gradients embed_loss_and_parts split_embed_gradients split_table_gradients",
        "parts": "UseParts UseSplit",
        "sampling": "sample",
    },
)
