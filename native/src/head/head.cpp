#include "head/head.h"

#include "error.h"
#include "fingerprint.h"

#include <algorithm>
#include <set>

namespace mtp {

// Limits of the graph cache. There is a graph for each depth, row count and length; sequences share them.
// A graph's activations take a few hundred KiB plus four bytes per step for each row of the head. The
// first limit may be exceeded within the second, so that many sequences of different lengths do not
// rebuild their graphs.
static const size_t FEW_GRAPHS = 32;
static const size_t GRAPH_BYTES = size_t(64) << 20;

static ggml_backend_ptr open_backend(const char * name, int n_threads) {
    if (ggml_backend_reg_count() == 0) {
        ggml_backend_load_all();
    }
    ggml_backend_dev_t device = ggml_backend_dev_by_name(name);
    if (device == nullptr) {
        std::string known;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            known += (i ? ", " : "") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
        }
        throw Error(MTP_ERROR_ARGUMENT, format("device: expected one of %s, found %s", known.c_str(), name));
    }
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw Error(MTP_ERROR_BACKEND, format("%s: ggml cannot start this device", name));
    }
    const auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
    if (set_n_threads != nullptr) {
        set_n_threads(backend.get(), n_threads);
    }
    return backend;
}

Head::Head(const std::string & path, const mtp_head_params & params)
    : file_(path), trunk_(params.trunk_path ? std::make_unique<GgufFile>(params.trunk_path) : nullptr),
      layers_(HeadConfig::read(file_)), n_ctx_(params.n_ctx), n_seq_max_(params.n_seq_max), n_batch_(params.n_batch) {
    type_ = Weights::quantized_type(params.type);
    require_range(params.n_threads, 1, 1024, "n_threads");
    require_range(n_ctx_, 1, 1 << 24, "n_ctx");
    require_range(n_seq_max_, 1, MTP_MAX_SEQUENCES, "n_seq_max");
    require_range(n_batch_, MTP_MAX_DEPTH + 1, 1 << 16, "n_batch");
    require_range(params.fastmtp_size, -1, INT32_MAX, "fastmtp_size");
    require_range(params.n_ring, -1, INT32_MAX, "n_ring");
    vocabulary_ = DraftVocabulary::read(file_, trunk_.get(), layers_, params.fastmtp_size, params.n_ring);
    backend_ = open_backend(params.device ? params.device : "CPU", params.n_threads);
    in_place_ = ggml_backend_buft_is_host(ggml_backend_get_default_buffer_type(backend_.get()));
    masks_on_device_ = !in_place_ && DraftGraph::computes_masks(backend_.get());
    weights_ = std::make_unique<Weights>(file_, trunk_.get(), layers_, vocabulary_,
                                         Weights::Loaded{params.embedding, params.output}, backend_.get(), type_,
                                         params.n_threads);
    cache_ = std::make_unique<HeadCache>(layers_, n_ctx_, n_seq_max_, backend_.get());
    hidden_rows_ = std::make_unique<HiddenRows>(width(), n_seq_max_, backend_.get());
    // Detects unsupported operations now instead of in the middle of a text. Every ggml device that runs
    // a trunk can take the most likely token; sampling needs a cumulative sum, which a few lack.
    cache_->reserve(0, 1);
    graph({0}, smallest_key(1, 1, false));
    try {
        graph({0}, smallest_key(1, 1, true));
    } catch (const Error & error) {
        if (error.status != MTP_ERROR_UNSUPPORTED) {
            throw;
        }
        draws_ = false;
    }
}

void Head::check(const std::string & path, const mtp_head_params & params) {
    Weights::quantized_type(params.type);
    const GgufFile file(path);
    const auto trunk = params.trunk_path ? std::make_unique<GgufFile>(params.trunk_path) : nullptr;
    const std::vector<HeadConfig> layers = HeadConfig::read(file);
    const DraftVocabulary vocabulary =
        DraftVocabulary::read(file, trunk.get(), layers, params.fastmtp_size, params.n_ring);
    const ggml_backend_ptr backend = open_backend(params.device ? params.device : "CPU", 1);
    for (const DraftTables & tables : vocabulary.tables) {
        Weights::embedding_type(tables, vocabulary, backend.get());
    }
}

// A backend whose device has failed is not freed: ggml would wait for the device, and its exception would
// end the process.
Head::~Head() {
    if (guard([&] { ggml_backend_synchronize(backend_.get()); }) != MTP_OK) {
        (void) backend_.release();
    }
}

mtp_head_info Head::info() const {
    mtp_head_info out = {};
    out.n_embd = int32_t(width());
    out.n_vocab = int32_t(vocabulary_.n_vocab);
    out.n_draft_vocab = int32_t(vocabulary_.size());
    out.n_ring = int32_t(vocabulary_.n_ring);
    out.block = layers_.front().block;
    out.n_ctx = int32_t(n_ctx_);
    out.n_seq_max = int32_t(n_seq_max_);
    out.max_depth = int32_t(max_depth());
    out.layout = vocabulary_.layout;
    out.moe = layers_.front().moe;
    out.tied = vocabulary_.tables.front().tied;
    out.draws = draws_;
    out.weight_bytes = weights_->copied_bytes();
    out.mapped_bytes = weights_->mapped_bytes();
    out.cache_bytes = cache_->bytes();
    return out;
}

double Head::stated_acceptance() const {
    const std::string keys = "mtp.acceptance.greedy.";
    if (!file_.has_key(keys + "drafted") || !file_.has_key(keys + "accepted")) {
        return -1;
    }
    try {
        const int64_t drafted = file_.integers(keys + "drafted", MTP_MAX_DEPTH, 0, INT32_MAX).front();
        const int64_t accepted = file_.integers(keys + "accepted", MTP_MAX_DEPTH, 0, drafted).front();
        return drafted > 0 ? double(accepted) / double(drafted) : -1;
    } catch (const Error &) { // a hint at most, without which the model runs as well
        return -1;
    }
}

void Head::check_seq(int32_t seq) const {
    require_range(seq, 0, n_seq_max_ - 1, "seq");
}

void Head::check_rows(int32_t seq, int64_t first, const int32_t * tokens, int64_t n_rows, int64_t least) const {
    check_seq(seq);
    require_range(n_rows, least, n_ctx_, "n_rows");
    if (n_rows > 0) {
        require(tokens, "tokens");
    }
    require_range(first, 0, n_ctx_ - 1, "first");
    if (!cache_->empty(seq) && first != cache_->next(seq)) {
        throw Error(MTP_ERROR_STATE, format("first: expected the next position %lld of sequence %d, found %lld",
                                            (long long) cache_->next(seq), seq, (long long) first));
    }
    if (n_rows > n_ctx_ - first) {
        throw Error(MTP_ERROR_FULL, format("the MTP layer's cache of %lld positions is full: %lld rows from position %lld",
                                           (long long) n_ctx_, (long long) n_rows, (long long) first));
    }
    for (int64_t i = 0; i < n_rows; ++i) {
        if (tokens[i] < 0 || tokens[i] >= vocabulary_.n_vocab) {
            throw Error(MTP_ERROR_ARGUMENT, format("tokens[%lld]: expected 0 to %lld, found %d", (long long) i,
                                                   (long long) vocabulary_.n_vocab - 1, tokens[i]));
        }
    }
}

void Head::check_depth(int32_t depth) const {
    require_range(depth, 1, max_depth(), layers_.size() == 1 ? "depth" : "depth (each layer drafts a token)");
}

// A key for a graph of sequence 0.
DraftGraph::Key Head::smallest_key(int64_t rows, int64_t depth, bool draws) const {
    DraftGraph::Key key = {{{in_place_ ? -1 : 0, depth, CACHE_BUCKET}}, rows, draws};
    key.masks_on_device = masks_on_device_;
    return key;
}

DraftGraph & Head::graph(const std::vector<int> & seqs, const DraftGraph::Key & key) {
    ++clock_;
    for (CachedGraph & cached : graphs_) {
        if (cached.graph->key() == key) {
            cached.last_used = clock_;
            return *cached.graph;
        }
    }
    while (graphs_.size() >= FEW_GRAPHS && graph_bytes_ > GRAPH_BYTES) {
        const auto oldest = std::min_element(graphs_.begin(), graphs_.end(), [](const auto & a, const auto & b) {
            return a.last_used < b.last_used;
        });
        graph_bytes_ -= oldest->graph->bytes();
        graphs_.erase(oldest);
    }
    auto made = std::make_unique<DraftGraph>(key, layers_, weights_->tensors(), *cache_, seqs, hidden_rows_->tensor(),
                                             backend_.get());
    ++built_graphs_;
    graphs_.push_back({std::move(made), clock_});
    graph_bytes_ += graphs_.back().graph->bytes();
    return *graphs_.back().graph;
}

// On the CPU the tasks are in the order of their depths, deepest first, and a graph is made for exactly these
// rows and depths and for any sequences. Other devices replay what repeats, so there rows are padded,
// depths are equal, and each choice of sequences has its own graph.
DraftGraph & Head::run(const std::vector<Task> & tasks, const Drawing * drawing) {
    const int64_t deepest = std::max_element(tasks.begin(), tasks.end(), [](const Task & a, const Task & b) {
                                return a.depth < b.depth;
                            })->depth;
    const bool shared = !in_place_ && tasks.size() > 1;
    DraftGraph::Key key = {{}, 1, drawing != nullptr};
    key.collects = imatrix_ != nullptr;
    std::vector<int> seqs;
    for (const Task & task : tasks) {
        key.rows = std::max(key.rows, task.feed.rows);
        seqs.push_back(task.feed.seq);
    }
    if (!in_place_ && deepest > 0) {
        key.rows = std::max(key.rows, deepest + 1);
        key.hidden_on_device = std::any_of(tasks.begin(), tasks.end(), [](const Task & task) {
            return task.feed.rows > 0 && task.feed.hidden == nullptr;
        });
        key.indexed = std::all_of(tasks.begin(), tasks.end(), [&](const Task & task) {
            return std::all_of(task.feed.tokens, task.feed.tokens + task.feed.rows,
                               [&](int32_t token) { return vocabulary_.index_of(token) >= 0; });
        });
    }
    for (const Task & task : tasks) {
        const int seq = task.feed.seq;
        const int64_t depth = in_place_ ? task.depth : deepest;
        const int64_t last = task.feed.first + task.feed.rows - 1;
        // Drafts and padding are stored after the last row.
        const int64_t end = last + 1 + std::max(depth, key.rows - task.feed.rows);
        cache_->reserve(seq, shared ? std::max(end, std::min(SHARED_ROWS, cache_->most_rows())) : end);
        // What only feeds reads nothing, so the number of rows need not follow the text there.
        key.sequences.push_back({in_place_ ? -1 : seq, depth,
                                 depth == 0 ? cache_->capacity(seq) : cache_->readable(seq, end, shared)});
    }
    key.masks_on_device = masks_on_device_ && deepest > 0 &&
                          std::all_of(key.sequences.begin(), key.sequences.end(), [](const auto & sequence) {
                              return sequence.n_kv <= DraftGraph::MOST_MASKED;
                          });
    DraftGraph & g = graph(seqs, key);
    std::vector<DraftGraph::Feed> feeds;
    for (const Task & task : tasks) {
        feeds.push_back(task.feed);
    }
    g.run(*cache_, vocabulary_, feeds, drawing, transfers_);
    if (imatrix_ != nullptr) {
        g.collect(*imatrix_);
    }
    last_drawn_ = drawing != nullptr ? &g : nullptr;
    for (const DraftGraph::Feed & feed : feeds) {
        if (feed.rows > 0) {
            cache_->extend(feed.seq, feed.first, feed.rows);
        }
    }
    return g;
}

void Head::feed(int32_t seq, int64_t first, const int32_t * tokens, const float * hidden, int64_t n_rows) {
    check_rows(seq, first, tokens, n_rows, 0);
    if (n_rows > 0) {
        require(hidden, "hidden");
    }
    const int64_t before = cache_->next(seq);
    try {
        for (int64_t done = 0; done < n_rows;) {
            const int64_t n = std::min(n_rows - done, n_batch_);
            run({{{seq, first + done, tokens + done, hidden + done * width(), n}, 0}});
            done += n;
        }
    } catch (...) {
        cache_->truncate(seq, before);
        throw;
    }
}

bool Head::keep_hidden(int32_t seq, int64_t at, const DeviceRows & from, int64_t n) {
    check_seq(seq);
    require_range(at, 0, INT32_MAX, "at");
    require_range(from.first, 0, INT32_MAX, "first");
    require_range(n, 1, INT32_MAX, "n");
    const ggml_tensor * t = from.tensor;
    const bool fits = t != nullptr && t->type == GGML_TYPE_F32 && t->ne[0] == width() && ggml_is_contiguous(t);
    return fits && !in_place_ && hidden_rows_->copy(seq, at, from, n);
}

void Head::keep_hidden(const DeviceRows & from, mtp_kept_rows * parts, int32_t n) {
    require_range(n, 1, n_seq_max_, "n");
    require(parts, "parts");
    for (int32_t i = 0; i < n; ++i) {
        parts[i].kept = false;
    }
    for (int32_t i = 0; i < n; ++i) {
        mtp_kept_rows & part = parts[i];
        part.kept = keep_hidden(part.seq, part.at, {from.backend, from.tensor, part.first}, part.n);
    }
}

void Head::get_hidden(int32_t seq, int64_t n, float * out) {
    check_seq(seq);
    check_kept(n);
    hidden_rows_->read(seq, 0, n, require(out, "out"));
}

// Hidden states on the device: their number is all that can be checked.
void Head::check_kept(int64_t n) const {
    require_range(n, 1, HiddenRows::EACH, "n_rows");
    if (hidden_rows_->tensor() == nullptr) {
        throw Error(MTP_ERROR_STATE, "no hidden states are on the device: expected mtp_head_keep_hidden first");
    }
}

void Head::read_drafts(const DraftGraph & graph, int64_t i, int32_t depth, int32_t * out_tokens, float * out_probs) const {
    for (int32_t step = 0; step < depth; ++step) {
        const int32_t index = graph.index(i, step);
        if (index < 0 || index >= vocabulary_.size()) {
            throw Error(MTP_ERROR_BACKEND, format("the draft graph chose row %d of %lld", index,
                                                  (long long) vocabulary_.size()));
        }
        out_tokens[step] = vocabulary_.target_id(index);
        out_probs[step] = graph.probability(i, step);
    }
}

// The sequences, first to end, of a graph for those from first to last on a device that replays graphs: the
// smallest of the ranges that halving all sequences repeatedly gives. So sequences that come and go change the
// graph seldom: there are less than two ranges for each sequence.
std::pair<int32_t, int32_t> Head::range_of(int32_t first, int32_t last) const {
    int32_t size = 1;
    while (first / size != last / size) {
        size *= 2;
    }
    const int32_t begin = first / size * size;
    return {begin, std::min(begin + size, int32_t(n_seq_max_))};
}

void Head::draft_batch(const mtp_draft_task * tasks, int32_t n, const Drawing * drawing, float * out_logits) {
    require_range(n, 1, n_seq_max_, "n");
    require(tasks, "tasks");
    std::vector<const mtp_draft_task *> order;
    std::vector<int64_t> before;
    int64_t deepest = 0;
    bool on_device = false; // the hidden states of a sequence, and so those of all
    for (int32_t i = 0; i < n; ++i) {
        const mtp_draft_task & d = tasks[i];
        check_rows(d.seq, d.first, d.tokens, d.n_rows, 1);
        if (d.hidden == nullptr) {
            check_kept(d.n_rows);
            on_device = true;
        }
        check_depth(d.depth);
        require(d.out_tokens, "out_tokens");
        require(d.out_probs, "out_probs");
        for (const mtp_draft_task * other : order) {
            if (other->seq == d.seq) {
                throw Error(MTP_ERROR_ARGUMENT, format("tasks[%d].seq: expected each sequence once, found %d again", i, d.seq));
            }
        }
        order.push_back(&d);
        deepest = std::max<int64_t>(deepest, d.depth);
    }
    // On the CPU deepest first, else by sequence, so that graphs repeat.
    std::sort(order.begin(), order.end(), [&](const mtp_draft_task * a, const mtp_draft_task * b) {
        return in_place_ && a->depth != b->depth ? a->depth > b->depth : a->seq < b->seq;
    });
    for (const mtp_draft_task * d : order) {
        before.push_back(cache_->next(d->seq));
    }
    try {
        // Sequences are padded to the same number of rows, so longer ones are fed in advance.
        const int64_t most = n == 1 ? n_batch_ : deepest + 1;
        const std::pair<int32_t, int32_t> seqs = range_of(order.front()->seq, order.back()->seq);
        std::vector<Task> parts;
        std::vector<int64_t> places; // of the tasks in the parts
        const auto fill_places = [&](int32_t end) {
            for (int32_t seq = seqs.first + int32_t(parts.size()); !in_place_ && seq < end; ++seq) {
                parts.push_back({{seq, std::max<int64_t>(cache_->next(seq), 1), nullptr, nullptr, 0}, deepest});
            }
        };
        for (const mtp_draft_task * d : order) {
            fill_places(d->seq);
            const int64_t ahead = std::max<int64_t>(0, d->n_rows - most);
            const int64_t rows = d->n_rows - ahead;
            const float * hidden = d->hidden;
            std::vector<float> read;
            if (hidden == nullptr && ahead > 0) {
                read.resize(size_t(ahead * width()));
                get_hidden(d->seq, ahead, read.data());
                hidden = read.data();
            }
            feed(d->seq, d->first, d->tokens, hidden, ahead);
            places.push_back(int64_t(parts.size()));
            parts.push_back({{d->seq, d->first + ahead, d->tokens + ahead, nullptr, rows}, d->depth});
            DraftGraph::Feed & part = parts.back().feed;
            if (d->hidden == nullptr) {
                part.on_device = ahead;
            } else if (on_device) {
                hidden_rows_->write(d->seq, 0, d->hidden + ahead * width(), rows);
            } else {
                part.hidden = d->hidden + ahead * width();
            }
        }
        fill_places(seqs.second);
        const DraftGraph & g = run(parts, drawing);
        for (size_t i = 0; i < order.size(); ++i) {
            read_drafts(g, places[i], order[i]->depth, order[i]->out_tokens, order[i]->out_probs);
        }
        for (int32_t step = 0; step < tasks->depth && out_logits != nullptr; ++step) {
            g.logits(places.front(), step, out_logits + int64_t(step) * vocabulary_.size());
        }
    } catch (...) {
        for (size_t i = 0; i < order.size(); ++i) {
            cache_->truncate(order[i]->seq, before[i]);
        }
        throw;
    }
}

void Head::rollback(int32_t seq, int64_t position) {
    check_seq(seq);
    require_range(position, 0, n_ctx_, "position");
    cache_->truncate(seq, position);
}

// Rows between two that are replaced are copied again if they are fewer, because each copy to a GPU has its cost.
static const int64_t COPIED_ALONG = 8;

void Head::set_ring(const std::vector<int32_t> & ids) {
    const int64_t first = vocabulary_.size() - vocabulary_.n_ring;
    const int32_t * current = vocabulary_.ids.data() + first;
    if (std::equal(ids.begin(), ids.end(), current)) {
        return;
    }
    for (int64_t begin = 0; begin < vocabulary_.n_ring;) {
        int64_t end = begin; // after the last row that differs, up to a few that do not
        for (int64_t i = begin; i < std::min(vocabulary_.n_ring, end + COPIED_ALONG); ++i) {
            if (current[i] != ids[size_t(i)]) {
                end = i + 1;
            }
        }
        if (end > begin) {
            weights_->replace_rows(first + begin, ids.data() + begin, end - begin);
        }
        begin = std::max(end, begin + 1);
    }
    vocabulary_.replace(first, ids.data(), vocabulary_.n_ring);
}

// Covers the norms, the first row of each matrix that keys and values are computed from, and the type that they are
// quantized to.
uint64_t Head::fingerprint() const {
    Fingerprint out;
    if (type_ != GGML_TYPE_COUNT) {
        out.add(uint64_t(type_));
    }
    const auto add = [&](const StoredTensor & tensor) { out.add(tensor.data, tensor.row_bytes()); };
    for (const HeadConfig & layer : layers_) {
        const auto add_named = [&](const char * suffix) {
            if (const std::unique_ptr<StoredTensor> tensor = file_.find(layer.name(suffix))) {
                add(*tensor);
            }
        };
        out.add(uint64_t(layer.block));
        out.add(uint64_t(layer.n_embd));
        out.add(uint64_t(layer.head_dim));
        out.add(uint64_t(layer.n_head_kv));
        const StoredAttention attention = StoredAttention::find(file_, layer);
        add_named("nextn.enorm.weight");
        add_named("nextn.hnorm.weight");
        add_named("nextn.eh_proj.weight");
        add_named("attn_norm.weight");
        add(attention.k);
        add_named("attn_k_norm.weight");
        add(attention.v);
    }
    return std::max<uint64_t>(out.value(), 1);
}

std::shared_ptr<void> Head::claim() {
    if (!user_.expired()) {
        throw Error(MTP_ERROR_STATE, "head: expected one that no session uses, found one in use; free that session, or "
                                     "load the head once more");
    }
    std::shared_ptr<void> user = std::make_shared<char>();
    user_ = user;
    return user;
}

size_t Head::rows_size(int32_t seq) const {
    check_seq(seq);
    return cache_->rows_bytes(cache_->next(seq) - cache_->first(seq));
}

void Head::get_rows(int32_t seq, void * out, size_t n) const {
    const size_t size = rows_size(seq);
    require_range((long long) n, (long long) size, (long long) size, "n");
    if (n > 0) {
        cache_->read_rows(seq, cache_->first(seq), cache_->next(seq) - cache_->first(seq),
                          static_cast<uint8_t *>(require(out, "out")));
    }
}

void Head::set_rows(int32_t seq, int64_t end, const void * rows, size_t n) {
    check_seq(seq);
    cache_->truncate(seq, 0);
    require_range(end, 0, n_ctx_, "end");
    const size_t row = cache_->rows_bytes(1);
    if (n % row != 0 || n / row > size_t(end)) {
        throw Error(MTP_ERROR_ARGUMENT, format("n: expected %lld rows or fewer of %zu bytes each, found %zu bytes",
                                               (long long) end, row, n));
    }
    if (n > 0) {
        cache_->write_rows(seq, end - int64_t(n / row), int64_t(n / row),
                           static_cast<const uint8_t *>(require(rows, "rows")));
    }
}

const std::string & Head::ops() {
    if (ops_.empty()) {
        std::set<std::string> names;
        graph({0}, smallest_key(2, 2, false)).collect_ops(names);
        if (draws_) {
            graph({0}, smallest_key(2, 2, true)).collect_ops(names);
        }
        for (const std::string & name : names) {
            ops_ += (ops_.empty() ? "" : " ") + name;
        }
    }
    return ops_;
}

} // namespace mtp
