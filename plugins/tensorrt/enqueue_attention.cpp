#include "adapters.h"

#include <glm_kernels/attention.h>
#include <glm_kernels/indexer.h>

namespace glm
{
namespace
{

int cacheFormat(Call const& call, int slot)
{
    return call.inputDescs[slot].type == nvinfer1::DataType::kINT8 ? GLM_CACHE_FP8 : GLM_CACHE_BF16;
}

// Sizes and attributes; pointers stay null.
GlmIndexerArgs indexerSizes(Call const& call)
{
    using In = slots::GlmIndexer::In;
    GlmIndexerArgs args{};
    args.num_rows = call.in(In::q, 0);
    args.num_requests = call.in(In::block_table, 0);
    args.pages_per_request = call.in(In::block_table, 1);
    args.num_layers = call.in(In::cache, 0);
    args.num_pages = call.in(In::cache, 1);
    args.layer = call.integer("layer");
    args.num_heads = call.integer("num_heads");
    args.head_dim = call.integer("head_dim");
    args.rope_dim = call.integer("rope_dim");
    args.index_topk = call.integer("index_topk");
    args.interleaved = call.integer("interleaved");
    args.cache_format = cacheFormat(call, In::cache);
    args.rope_theta = call.real("rope_theta");
    args.eps = call.real("eps");
    return args;
}

GlmMlaAttentionArgs attentionSizes(Call const& call)
{
    using In = slots::GlmMlaAttention::In;
    GlmMlaAttentionArgs args{};
    args.num_rows = call.in(In::q, 0);
    args.num_requests = call.in(In::block_table, 0);
    args.pages_per_request = call.in(In::block_table, 1);
    args.num_layers = call.in(In::cache, 0);
    args.num_pages = call.in(In::cache, 1);
    args.layer = call.integer("layer");
    args.num_heads = call.integer("num_heads");
    args.nope_dim = call.integer("nope_dim");
    args.rope_dim = call.integer("rope_dim");
    args.v_dim = call.integer("v_dim");
    args.kv_lora = call.integer("kv_lora");
    args.topk = call.in(In::selection, 1);
    args.latent_width = call.in(In::latent, 1);
    args.column_offset = call.integer("column_offset");
    args.interleaved = call.integer("interleaved");
    args.cache_format = cacheFormat(call, In::cache);
    args.num_splits = 0;
    args.rope_theta = call.real("rope_theta");
    args.scale = call.real("scale");
    args.eps = call.real("eps");
    return args;
}

} // namespace

size_t workspaceIndexer(Call const& call)
{
    GlmIndexerArgs const args = indexerSizes(call);
    return glm_indexer_workspace_bytes(&args);
}

int enqueueIndexer(Call const& call)
{
    using In = slots::GlmIndexer::In;
    using Out = slots::GlmIndexer::Out;
    GlmIndexerArgs args = indexerSizes(call);
    args.q = call.input(In::q);
    args.key_gate = call.input<float>(In::key_gate);
    args.k_norm_weight = call.input<float>(In::k_norm_weight);
    args.k_norm_bias = call.input<float>(In::k_norm_bias);
    args.positions = call.input<int32_t>(In::positions);
    args.row_requests = call.input<int32_t>(In::row_requests);
    args.block_table = call.input<int32_t>(In::block_table);
    args.cache = call.output(Out::cache_out);
    args.selection = call.output<int32_t>(Out::selection);
    return glm_indexer(&args, call.workspace, call.workspaceBytes, call.stream);
}

size_t workspaceMlaAttention(Call const& call)
{
    GlmMlaAttentionArgs const args = attentionSizes(call);
    return glm_mla_attention_workspace_bytes(&args);
}

int enqueueMlaAttention(Call const& call)
{
    using In = slots::GlmMlaAttention::In;
    using Out = slots::GlmMlaAttention::Out;
    GlmMlaAttentionArgs args = attentionSizes(call);
    args.q = call.input(In::q);
    args.latent = call.input(In::latent);
    args.kv_norm_weight = call.input(In::kv_norm_weight);
    args.w_uk = call.input(In::w_uk);
    args.w_uv = call.input(In::w_uv);
    args.selection = call.input<int32_t>(In::selection);
    args.positions = call.input<int32_t>(In::positions);
    args.row_requests = call.input<int32_t>(In::row_requests);
    args.block_table = call.input<int32_t>(In::block_table);
    args.cache = call.output(Out::cache_out);
    args.out = call.output(Out::out);
    return glm_mla_attention(&args, call.workspace, call.workspaceBytes, call.stream);
}

} // namespace glm
