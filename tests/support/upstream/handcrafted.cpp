// Writes the files that llama.cpp's own test makes by hand, sound and malformed, for our reader.
//
//     handcrafted SEED FOLDER
//
// TEST_GGUF is that test's source; EVERY_CASE lists the names of its enum as CASE(NAME). Each case
// becomes FOLDER/NAME.gguf, and a line says whether upstream expects it to be read.

#define main upstream_main
#include TEST_GGUF
#undef main

#include <fstream>

static bool save(FILE * from, const std::string & path) {
    if (from == nullptr) {
        return false;
    }
    std::ofstream to(path, std::ios::binary);
    char buffer[1 << 16];
    size_t n;
    while ((n = fread(buffer, 1, sizeof(buffer), from)) > 0) {
        to.write(buffer, std::streamsize(n));
    }
    fclose(from);
    to.close();
    return to.good();
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        return 2;
    }
    const unsigned seed = unsigned(std::stoul(argv[1]));
    const std::string folder = argv[2];
    (void) upstream_main;
#define CASE(name)                                                                                 \
    if (!save(get_handcrafted_file(seed, name), folder + "/" #name ".gguf")) {                     \
        return 1;                                                                                  \
    }                                                                                              \
    printf("%s %d\n", #name, int(expect_context_not_null(name)));
    EVERY_CASE
    return 0;
}
