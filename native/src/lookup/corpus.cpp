#include "lookup/corpus.h"

#include "error.h"
#include "fingerprint.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

namespace mtp {

namespace {

struct Header {
    char magic[8];
    uint64_t tokenizer; // fingerprint of the vocabulary that the tokens belong to
    int64_t n_tokens;
    int64_t n_sorted;
    uint64_t checksum; // of all bytes after the header
    int32_t n_vocab;
    int32_t zero;
};
static_assert(sizeof(Header) == 48, "the layout of the file");

constexpr char kMagic[8] = {'M', 'T', 'P', 'T', 'E', 'X', 'T', '1'};

// Detects damage; it is no protection against forgery, which every access is checked for.
uint64_t checksum(const int32_t * values, size_t n, uint64_t sum) {
    for (size_t i = 0; i < n; ++i) {
        sum = (sum ^ uint32_t(values[i])) * 0x9e3779b97f4a7c15ull;
        sum ^= sum >> 29;
    }
    return sum;
}

// The i-th token before a position, from 0 on; kEnd before the beginning of the texts.
int32_t before(const int32_t * tokens, int64_t n, int64_t position, int32_t i) {
    const int64_t at = position - 1 - i;
    return at >= 0 && at < n ? tokens[at] : Corpus::kEnd;
}

[[noreturn]] void damaged(const std::string & path, const char * what) {
    throw Error(MTP_ERROR_FORMAT, format("%s: expected an index of lookup files, found %s; delete it, so that it is "
                                         "built again", path.c_str(), what));
}

} // namespace

Corpus::Corpus(const std::string & path, int32_t n_vocab, uint64_t tokenizer) : map_(path), n_vocab_(n_vocab) {
    Header header;
    if (map_.size() < sizeof(header)) {
        damaged(path, "a shorter file");
    }
    std::memcpy(&header, map_.data(), sizeof(header));
    if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
        damaged(path, "another kind of file");
    }
    if (header.tokenizer != tokenizer || header.n_vocab != n_vocab) {
        damaged(path, "one of another tokenizer");
    }
    const bool plausible = header.n_tokens >= 1 && header.n_tokens <= MTP_MAX_INDEXED && header.n_sorted >= 0 &&
                           header.n_sorted <= header.n_tokens;
    if (!plausible || map_.size() != sizeof(header) + size_t(header.n_tokens + header.n_sorted) * sizeof(int32_t)) {
        damaged(path, "a size that is not the one in its header");
    }
    n_tokens_ = header.n_tokens;
    n_sorted_ = header.n_sorted;
    tokens_ = reinterpret_cast<const int32_t *>(map_.data() + sizeof(header));
    sorted_ = tokens_ + n_tokens_;
    if (checksum(tokens_, size_t(n_tokens_ + n_sorted_), 0) != header.checksum) {
        damaged(path, "one whose content has changed");
    }
    const bool tokens_fit = std::all_of(tokens_, tokens_ + n_tokens_, [&](int32_t t) { return t >= kEnd && t < n_vocab; });
    const bool sorted_fit = std::all_of(sorted_, sorted_ + n_sorted_, [&](int32_t p) { return p >= 1 && p < n_tokens_; });
    if (!tokens_fit || !sorted_fit || tokens_[n_tokens_ - 1] != kEnd) {
        damaged(path, "tokens or positions that cannot be");
    }
}

uint64_t Corpus::tokenizer(const char * const * texts, int32_t n_vocab) {
    Fingerprint out;
    for (int32_t i = 0; i < n_vocab; ++i) {
        out.add(texts[i], std::strlen(texts[i]) + 1);
    }
    return out.value();
}

Corpus::Match Corpus::match(const int32_t * tokens, int64_t n) const {
    const int32_t most = int32_t(std::min<int64_t>(n, kMostContext));
    const auto shared = [&](int32_t position) {
        int32_t i = 0;
        while (i < most && before(tokens_, n_tokens_, position, i) == tokens[n - 1 - i]) {
            ++i;
        }
        return i;
    };
    const auto less = [&](int32_t position, int) {
        const int32_t i = shared(position);
        return i < most && before(tokens_, n_tokens_, position, i) < tokens[n - 1 - i];
    };
    const int32_t * at = std::lower_bound(sorted_, sorted_ + n_sorted_, 0, less);
    Match best;
    for (const int64_t i : {at - sorted_ - 1, at - sorted_}) {
        if (i < 0 || i >= n_sorted_) {
            continue;
        }
        const int32_t position = sorted_[i]; // checked once more: another process may have changed the file
        const int32_t length = position >= 1 && position < n_tokens_ ? shared(position) : 0;
        if (length > best.length) {
            best = {length, position};
        }
    }
    return best;
}

int32_t Corpus::propose(const Match & match, int32_t * out, int32_t n) const {
    int32_t copied = 0;
    if (match.length > 0) {
        for (; copied < n && match.next + copied < n_tokens_; ++copied) {
            const int32_t token = tokens_[match.next + copied];
            if (token < 0 || token >= n_vocab_) { // the end of a text; or another process changed the file
                break;
            }
            out[copied] = token;
        }
    }
    return copied;
}

void Corpus::write(const std::string & path, const int32_t * tokens, int64_t n, int32_t n_vocab, uint64_t tokenizer) {
    std::vector<int32_t> sorted;
    for (int64_t i = 1; i < n; ++i) {
        if (tokens[i - 1] != kEnd && tokens[i] != kEnd) {
            sorted.push_back(int32_t(i));
        }
    }
    std::sort(sorted.begin(), sorted.end(), [&](int32_t a, int32_t b) {
        for (int32_t i = 0; i < kMostContext; ++i) {
            const int32_t in_a = before(tokens, n, a, i);
            const int32_t in_b = before(tokens, n, b, i);
            if (in_a != in_b) {
                return in_a < in_b;
            }
            if (in_a == kEnd) {
                break; // what is before it belongs to another text
            }
        }
        return a < b;
    });
    Header header = {};
    std::memcpy(header.magic, kMagic, sizeof(kMagic));
    header.tokenizer = tokenizer;
    header.n_tokens = n;
    header.n_sorted = int64_t(sorted.size());
    header.n_vocab = n_vocab;
    header.checksum = checksum(sorted.data(), sorted.size(), checksum(tokens, size_t(n), 0));

    const std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(open_for_writing(path), std::fclose);
    const bool written = file && std::fwrite(&header, sizeof(header), 1, file.get()) == 1 &&
                         std::fwrite(tokens, sizeof(int32_t), size_t(n), file.get()) == size_t(n) &&
                         std::fwrite(sorted.data(), sizeof(int32_t), sorted.size(), file.get()) == sorted.size() &&
                         std::fflush(file.get()) == 0;
    if (!written) {
        throw Error(MTP_ERROR_FILE, format("%s: cannot be written: %s", path.c_str(), std::strerror(errno)));
    }
}

} // namespace mtp
