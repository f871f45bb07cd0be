#pragma once
// The opaque index of lookup files of mtp.h.

#include "corpus.h"

#include "mtp.h"

struct mtp_corpus : mtp::Corpus {
    using Corpus::Corpus;
};
