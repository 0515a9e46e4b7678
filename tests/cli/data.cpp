// moesaic data: what it prints, writes and refuses.
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/catch.h"

namespace {

struct Result {
  int code = -1;
  std::string output;
};

Result data(const std::string& arguments) {
  Result result;
  FILE* pipe = popen((MOESAIC_BINARY " data " + arguments + " 2>&1").c_str(), "r");
  REQUIRE(pipe);
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    result.output.append(buffer.data(), n);
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

bool has(const Result& result, const std::string& part) {
  return result.output.find(part) != std::string::npos;
}

class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              ("moesaic_data_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

}  // namespace

TEST_CASE("cli data: text is merged into a pair that info, sample and validate read") {
  const Folder folder;
  const std::string one = folder.write("one.txt", "first\n\f\nsecond text\n"),
                    two = folder.write("two.txt", "third\n");
  const std::string out = folder / "all";
  const Result merged = data("merge " + out + " " + one + " " + two);
  CHECK(merged.code == 0);
  CHECK(has(merged, "3 documents, 27 tokens (u16) from 2 files"));
  CHECK(has(data("merge " + out + " " + one), "already exists"));
  CHECK(data("merge " + out + " " + one).code == 2);
  CHECK(has(data("merge " + out + " " + out), "both read and written"));
  const Result info = data("info " + out);
  CHECK(info.code == 0);
  for (const char* part : {"megatron, tokens u16",
                           "documents  3",
                           "tokens     27",
                           "end        token 0",
                           "tokenizer  bytes",
                           "vocabulary 256"}) {
    INFO(part);
    CHECK(has(info, part));
  }
  const Result sample = data("sample " + out + " --index 1,2");
  CHECK(sample.code == 0);
  CHECK(has(sample, "document 1: 13 tokens\n  tokens   115 101 99 111 110 100 32"));
  CHECK(has(sample, "\"second text\\n\""));
  CHECK(has(data("sample " + out + " --index 3"), "allowed: 0 to 2"));
  CHECK(has(data("sample " + out + " -n 1 --sequence-length 8"), "sample "));
  CHECK(has(data("validate " + out), "checked: sizes, checksums, every token id below 256"));
  CHECK(has(data("validate --quick " + out), "checked: sizes\n"));
  // One byte of the data changes: the ids are still fine, the checksum is not.
  std::fstream bin(out + ".bin", std::ios::in | std::ios::out | std::ios::binary);
  bin.put('x');
  bin.close();
  CHECK(data("validate --quick " + out).code == 0);
  const Result damaged = data("validate " + out + " " + one);
  CHECK(damaged.code == 3);
  CHECK(has(damaged, "all.bin: checksum crc32c"));
  CHECK(has(damaged, "one.txt: fine"));  // the others are looked at, too
  CHECK(has(damaged, "1 of 2 files are not valid"));
  // A cut copy.
  std::filesystem::resize_file(out + ".bin", 20);
  const Result cut = data("info " + out);
  CHECK(cut.code == 3);
  CHECK(has(cut, "all.bin:20: the file ends here"));
}

TEST_CASE("cli data: bad files and conversations") {
  const Folder folder;
  const std::string chat = folder.write("c.jsonl",
                                        R"({"prompt": "2+2=", "completion": "4"})"
                                        "\n");
  const Result sample = data("sample " + chat);
  CHECK(sample.code == 0);
  CHECK(has(sample, "targets  52 0"));
  CHECK(data("merge " + (folder / "m") + " " + chat).code == 2);
  folder.write("c2.jsonl", R"({"text": "x"})");
  CHECK(has(data("validate " + (folder / "c2.jsonl")), "c2.jsonl:0: line 1: a record needs"));
  folder.write("bad.idx", "this is a text");
  folder.write("bad.bin", "1234");
  const Result bad = data("info " + (folder / "bad"));
  CHECK(bad.code == 3);
  CHECK(has(bad, "bad.idx:0: not a Megatron index: magic \"this is a text\""));
  std::filesystem::remove(folder / "bad.bin");
  CHECK(has(data("info " + (folder / "bad.idx")), "bad.idx:0: not a Megatron index"));
  folder.write("none.bin", "");
  CHECK(has(data("info " + (folder / "none.bin")), "This is an empty file"));
  folder.write("swapped.bin", std::string("\x01\x34\xD8\x88\0\0\0\1", 8));
  CHECK(has(data("info " + (folder / "swapped.bin")), "llm.c in big-endian byte order"));
  folder.write("raw.bin", std::string("\1\0\2\0\xff\xff", 6));
  CHECK(has(data("info " + (folder / "raw.bin")), "data.format: nanogpt"));
  CHECK(has(data("info --format nanogpt " + (folder / "raw.bin")), "tokens     3"));
  const Result high = data("validate --format nanogpt --vocab-size 50257 " + (folder / "raw.bin"));
  CHECK(high.code == 3);
  CHECK(has(high, "raw.bin:4: token id 65535 in document 0, allowed 0 to 50256"));
  CHECK(has(data("merge " + (folder / "m") + " --format nanogpt " + (folder / "raw.bin")),
            "say --vocab-size"));
  CHECK(data("info " + (folder / "nowhere.txt")).code == 3);
  CHECK(data("").code == 2);
  for (const std::string command : {"info", "validate", "merge", "sample"}) {
    const Result help = data(command + " --help");
    CHECK(help.code == 0);
    CHECK(has(help, "Example:\n  moesaic data " + command));
  }
}
