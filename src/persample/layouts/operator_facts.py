"""What is known of operators by name, besides how they move layouts."""

from __future__ import annotations

# Results may share memory with an argument.
ALIASING = frozenset(
    """view reshape flatten unflatten ravel view_as reshape_as permute transpose swapaxes swapdims t
    T H mT mH adjoint movedim moveaxis unsqueeze squeeze expand expand_as broadcast_to select
    narrow unbind chunk split split_with_sizes tensor_split hsplit vsplit dsplit diagonal unfold
    getitem to type float double half bfloat16 contiguous detach alias data real imag conj
    view_as_real view_as_complex resolve_conj resolve_neg positive as_tensor linalg_diagonal
    type_as slice as_strided broadcast_tensors atleast_1d atleast_2d atleast_3d meshgrid""".split()
)
# Only shape or dtype of all arguments but the first are looked at.
SHAPE_ONLY = frozenset(
    """expand_as view_as reshape_as type_as to zeros_like ones_like empty_like""".split()
)
# Only shape, dtype and device of the first argument are looked at.
LIKE = frozenset(
    """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros
    new_ones new_empty new_empty_strided new_full""".split()
)
# The operator's own backward does not keep its result: a tap may go on it without a copy.
FRESH = frozenset(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm group_norm
    batch_norm rms_norm mul multiply add sub rsub matmul mm bmm addmm baddbmm linear einsum cat
    embedding stack div where""".split()
)
# No derivative depends on the arguments' values: of data used with a parameter, shapes are kept.
ADDITIVE = frozenset("add sub subtract rsub cat concat concatenate stack".split())
# Matrix products: their backward wants a contiguous gradient.
PRODUCTS = frozenset(("linear", "matmul", "addmm", "baddbmm", "bmm", "einsum"))
# Most memory is taken while the gradient of the input is computed: rows wait until that is over.
LATE = frozenset(("conv3d",))
# Random numbers are drawn.
RANDOM = frozenset(
    """dropout alpha_dropout feature_dropout feature_alpha_dropout rrelu bernoulli normal poisson
    binomial scaled_dot_product_attention lstm gru rnn_tanh rnn_relu fractional_max_pool2d
    fractional_max_pool3d native_dropout multinomial _standard_gamma _sample_dirichlet""".split()
)
# Positions are counted, from no data.
COUNTS = frozenset("arange linspace logspace eye tril_indices triu_indices".split())
# Integer arguments choose rows or elements.
CHOOSES = frozenset(
    """getitem index masked_select index_select gather take take_along_dim setitem index_put
    index_add index_copy index_reduce index_fill scatter scatter_add scatter_reduce put
    masked_scatter embedding embedding_bag""".split()
)
# Recurrent layers and cells.
RECURRENT = frozenset(
    """lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell""".split()
)
# Besides the element-by-element operators: closed layouts and shapes alone decide where the
# samples go, not values, strides or dtypes.
BY_SHAPE = frozenset(
    """view reshape flatten unflatten permute transpose swapaxes t mT unsqueeze squeeze expand
    select narrow unbind chunk split split_with_sizes movedim matmul mm bmm addmm baddbmm linear
    einsum scaled_dot_product_attention cat stack conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d layer_norm rms_norm group_norm batch_norm softmax log_softmax
    sum mean amax amin logsumexp var std max_pool1d max_pool2d avg_pool1d avg_pool2d
    adaptive_avg_pool1d adaptive_avg_pool2d embedding pad constant_pad_nd cumsum repeat roll flip
    where prelu cross_entropy_loss nll_loss_nd nll_loss nll_loss2d glu T""".split()
)
# The same, where no tensor but the one that is read takes part: none says what is picked.
BY_SHAPE_ALONE = frozenset(("getitem",))
# A custom function that takes parameters beside data, as if it were an operator.
CUSTOM = "a custom autograd.Function"
