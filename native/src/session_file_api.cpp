// The C functions of session files: they check arguments, then call session_file.h.

#include "error.h"
#include "session_fields.h"
#include "session_file.h"

#include <algorithm>

using mtp::guard;
using mtp::require;
using mtp::require_range;

struct mtp_session_file : mtp::SessionFile {
    using SessionFile::SessionFile;
};

static size_t require_section(const mtp_session_file * file, int32_t i) {
    require_range(i, 0, int32_t(require(file, "file")->header().sections.size()) - 1, "section");
    return size_t(i);
}

mtp_status mtp_session_file_open(const char * path, mtp_session_file ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_session_file(require(path, "path"));
    });
}

void mtp_session_file_close(mtp_session_file * file) {
    delete file;
}

mtp_status mtp_session_file_get_info(const mtp_session_file * file, mtp_session_file_info * out) {
    return guard([&] {
        const mtp::SessionHeader & header = require(file, "file")->header();
        *require(out, "out") = {header.nbytes,
                                header.owner,
                                int32_t(header.program),
                                int32_t(header.n_tokens),
                                int32_t(header.sections.size()),
                                int32_t(header.identity.size()),
                                header.extra.data(),
                                header.extra.size()};
    });
}

mtp_status mtp_session_file_get_section(const mtp_session_file * file, int32_t i, mtp_session_section * out) {
    return guard([&] {
        const size_t index = require_section(file, i);
        const mtp::SessionSection & section = file->header().sections[index];
        *require(out, "out") = {file->header().section_name(index), section.offset, section.nbytes, section.checksum,
                                int32_t(section.n_tokens)};
    });
}

mtp_status mtp_session_file_get_field(const mtp_session_file * file, int32_t i, mtp_session_field * out) {
    return guard([&] {
        const auto & identity = require(file, "file")->header().identity;
        require_range(i, 0, int32_t(identity.size()) - 1, "field");
        *require(out, "out") = {identity[size_t(i)].first.c_str(), identity[size_t(i)].second.c_str()};
    });
}

mtp_status mtp_session_file_read(const mtp_session_file * file, int32_t i, void * out, size_t n) {
    return guard([&] {
        const size_t index = require_section(file, i);
        const auto nbytes = (long long) file->header().sections[index].nbytes;
        require_range((long long) n, out ? nbytes : 0, out ? nbytes : 0, "n");
        file->read(index, out);
    });
}

mtp_status mtp_session_file_header(const char * path, const mtp_session_file_info * info, mtp_session_section * sections,
                                   const mtp_session_field * fields, void * out, size_t n, size_t * out_n) {
    return guard([&] {
        mtp::SessionHeader header;
        header.program = uint32_t(require(info, "info")->program);
        header.n_tokens = uint32_t(info->n_tokens);
        header.owner = info->owner;
        require_range(info->n_sections, 2, mtp::SessionHeader::MOST_SECTIONS, "n_sections");
        require_range(info->n_fields, 0, mtp::SessionHeader::MOST_FIELDS, "n_fields");
        for (int32_t i = 0; i < info->n_sections; ++i) {
            const mtp_session_section & section = require(sections, "sections")[i];
            header.sections.push_back({0, section.nbytes, section.checksum, uint32_t(section.n_tokens)});
        }
        for (int32_t i = 0; i < info->n_fields; ++i) {
            const mtp_session_field & field = require(fields, "fields")[i];
            header.identity.emplace_back(require(field.name, "name"), require(field.value, "value"));
        }
        if (info->n_extra > 0) {
            header.extra.assign(static_cast<const char *>(require(info->extra, "extra")), info->n_extra);
        }
        const std::vector<uint8_t> bytes = header.write(require(path, "path"));
        *require(out_n, "out_n") = bytes.size();
        for (int32_t i = 0; i < info->n_sections; ++i) {
            sections[i].offset = header.sections[size_t(i)].offset;
        }
        if (out != nullptr) {
            require_range((long long) n, (long long) bytes.size(), (long long) bytes.size(), "n");
            std::copy(bytes.begin(), bytes.end(), static_cast<uint8_t *>(out));
        }
    });
}

const char * mtp_session_fields(void) {
#define MTP_KEPT(PARAMETERS, FIELD) #PARAMETERS " " #FIELD " kept\n"
#define MTP_PLACED(PARAMETERS, FIELD) #PARAMETERS " " #FIELD " placed\n"
#define MTP_LEFT_OUT(PARAMETERS, FIELD, WHY) #PARAMETERS " " #FIELD " " WHY "\n"
    return MTP_SESSION_FIELDS(MTP_KEPT, MTP_PLACED, MTP_LEFT_OUT);
}
