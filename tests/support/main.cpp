// The runner of Catch2 v2; v3 brings its own (tests/CMakeLists.txt).
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
